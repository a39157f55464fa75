import copy
import pickle
import random

import pytest
import torch
from mmdet.registry import MODELS
from torch import nn

from damex.errors import ConfigError
from damex.models.feature_cache import ADMITTED, FeatureCache, reports
from damex.models.timm_backbone import TimmBackbone

SWIN = dict(embed_dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), drop_path_rate=0)
BACKBONES = [
    dict(name="test_efficientnet", out_indices=(2, 3, 4), frozen_stages=2),
    dict(name="test_efficientnet", out_indices=(0, 1, 4), frozen_stages=2),
    dict(name="test_efficientnet", out_indices=(1, 2), frozen_stages=0),
    dict(name="test_resnet", out_indices=(1, 2, 3), frozen_stages=1),
    dict(name="test_resnet", out_indices=(2, 3), frozen_stages=3),
    dict(name="test_convnext", frozen_stages=1, channels_last=True),
    dict(name="swin_tiny_patch4_window7_224", frozen_stages=1, **SWIN),
]


def pair(config):
    """Twins, of which one keeps what its frozen stages make."""
    torch.manual_seed(0)
    plain = TimmBackbone(**config, norm_eval=True)
    cached = TimmBackbone(**config, norm_eval=True, cache_mib=64)
    cached.load_state_dict(plain.state_dict())
    return plain.train(), cached.train()


def gradients(backbone, images):
    backbone.zero_grad()
    maps = [one for one in backbone(images) if one.requires_grad]
    if maps:
        torch.stack([one.square().mean() for one in maps]).sum().backward()
    return {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", BACKBONES, ids=lambda c: str(list(c.values())[:3]))
def test_maps_and_gradients_are_those_without_a_cache(config):
    plain, cached = pair(config)
    images = torch.rand(3, 3, 70, 64)
    for hits in (0, 3, 6):
        for ours, theirs in zip(cached(images), plain(images), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad
        assert cached.feature_cache._hits == hits
    expected = gradients(plain, images)
    found = gradients(cached, images)
    assert list(found) == list(expected)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])
    mixed = torch.cat([torch.rand(1, 3, 70, 64), images[1:], torch.rand(1, 3, 70, 64)])
    for ours, theirs in zip(cached(mixed), plain(mixed), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert list(cached.state_dict()) == list(plain.state_dict())


@pytest.fixture
def backbone():
    return pair(BACKBONES[0])[1]


def test_only_new_images_are_computed(backbone):
    computed = []
    backbone.net.conv_stem.register_forward_hook(
        lambda module, given, made: computed.append(len(made))
    )
    images = torch.rand(4, 3, 64, 64)
    backbone(images[:2])
    backbone(images[[1, 2, 0, 3]])
    backbone(images)
    assert computed == [2, 2]
    backbone(images.flip(-1))  # other pixels
    backbone(images[..., :32])  # padding is part of the image that the layers see
    assert computed == [2, 2, 4, 4]
    backbone.eval()(images)  # each image once, so nothing is kept or looked up
    assert computed == [2, 2, 4, 4, 4]


def test_images_of_equal_bytes_and_other_shape_differ(backbone):
    flat = torch.zeros(1, 3, 32, 96)
    assert backbone(flat)[0].shape[-2:] == (4, 12)
    assert backbone(flat.mT)[0].shape[-2:] == (12, 4)


def test_new_frozen_weights_empty_the_cache(backbone):
    images = torch.rand(2, 3, 64, 64)
    before = backbone(images)[0]
    state = {k: v + 0.1 for k, v in backbone.state_dict().items()}
    backbone.load_state_dict(state)
    after = backbone(images)[0]
    assert not torch.allclose(before, after)
    assert torch.equal(after, backbone.eval()(images)[0])
    backbone.train().net.bn1.running_mean.add_(1.0)
    assert not torch.allclose(backbone(images)[0], after)
    later = backbone.net.blocks[-1][0].conv_pw.weight  # trained, as in every step
    with torch.no_grad():
        later.add_(1.0)
    hits = backbone.feature_cache._hits
    backbone(images)
    assert backbone.feature_cache._hits == hits + 2


def test_features_of_another_precision_are_not_taken(backbone):
    images = torch.rand(1, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert backbone(images)[0].dtype == torch.bfloat16
    assert backbone(images)[0].dtype == torch.float32


def test_what_is_done_to_the_maps_does_not_reach_the_cache(backbone):
    images = torch.rand(2, 3, 64, 64)
    expected = backbone(images)[0].clone()
    for _ in range(2):
        made = backbone(images)[0]
        assert torch.equal(made, expected)
        made.zero_()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_start_empty(backbone, duplicate):
    images = torch.rand(2, 3, 64, 64)
    expected = backbone(images)
    twin = duplicate(backbone)
    assert twin.feature_cache.size_mib == 64
    assert twin.feature_cache.mib == 0 < backbone.feature_cache.mib
    for ours, theirs in zip(twin(images), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_trained_layer_is_refused(backbone):
    backbone.net.blocks[1] = nn.Sequential(nn.Conv2d(8, 8, 1))  # as an insertion does
    with pytest.raises(ConfigError, match=r"weight of Seq.* is trained"):
        backbone(torch.rand(1, 3, 64, 64))


def pictures(numbers):
    """One picture of 1 KiB for each number."""
    return torch.stack([torch.full((1, 16, 16), float(n)) for n in numbers])


class Asked:
    """A cache of a few KiB over a network that doubles, and the images it computed."""

    def __init__(self, kib):
        self.cache = FeatureCache(kib / 1024)
        self.computed = []

    def __call__(self, *numbers):
        self.computed.clear()
        (doubled,) = self.cache.features(pictures(numbers), self._double, [])
        assert torch.equal(doubled, 2 * pictures(numbers))
        return list(self.computed)

    def _double(self, images):
        self.computed += images[:, 0, 0, 0].int().tolist()
        return [2 * images]


def test_a_full_cache_lets_one_in_eight_in_for_the_least_recently_used():
    asked = Asked(kib=4)
    assert asked(0, 1, 2, 3) == [0, 1, 2, 3]
    assert asked(0) == []  # now 1 is the one not used for longest
    for number in range(10, 10 + ADMITTED - 1):
        assert asked(number) == [number]
    assert asked(2, 3, 0, 1) == []  # and now 2
    assert asked(99) == [99]
    assert asked(99, 3, 0, 1) == []
    assert asked(2) == [2]
    assert asked.cache.mib == 4 / 1024


def test_an_image_that_comes_twice_in_a_batch_is_kept_once():
    asked = Asked(kib=4)
    asked(5, 5, 6)
    assert asked.cache.mib == 2 / 1024


def test_an_image_larger_than_the_cache_passes_by():
    asked = Asked(kib=0.5)
    assert asked(1) == asked(1) == [1]
    assert asked.cache.mib == 0


def test_half_the_room_finds_nearly_half_the_images_of_a_shuffled_epoch():
    # Least recently used alone finds 15 %: an image leaves just before it comes again.
    asked, shuffler = Asked(kib=100), random.Random(0)
    for _ in range(3):
        order = shuffler.sample(range(200), 200)
        computed = [number for one in order for number in asked(one)]
    assert 0.38 < 1 - len(computed) / 200 <= 0.5


def test_the_report_says_how_many_images_were_found():
    asked = Asked(kib=2048)
    assert asked.cache.report() == ""
    asked(1, 2)
    asked(1, 2)
    assert asked.cache.report() == (
        "frozen features: 50 % of 4 images from the cache (0 MiB of 2)"
    )


def test_the_report_says_why_images_are_not_found():
    asked = Asked(kib=2)
    asked(1, 2)
    assert asked.cache.report().endswith("short epochs show a part of the data")
    asked(3)
    assert asked.cache.report().endswith("it is full: raise backbone.cache_mib")


def test_a_detector_trains_as_without_a_cache(
    model_config, make_batch, run_loss, total
):
    losses = []
    for mib in (0, 16):
        config = model_config()
        config.backbone = dict(
            type="TimmBackbone",
            name="test_convnext",
            frozen_stages=1,
            cache_mib=mib,
        )
        config.neck.in_channels = [32, 48, 64]
        torch.manual_seed(0)
        detector = MODELS.build(config).train()
        detector.init_weights()
        optimizer = torch.optim.SGD(
            [p for p in detector.parameters() if p.requires_grad], lr=1e-3
        )
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = total(run_loss(detector, make_batch([0, 2])))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        assert len(list(reports(detector))) == bool(mib)
    assert losses[0] == losses[1]
    assert losses[1][0] != losses[1][2]
    (line,) = reports(detector)
    assert line.startswith("frozen features: 67 % of 6 images")
