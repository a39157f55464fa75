"""Predictor: what it takes from a checkpoint, and whose classes it looks for."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from torchvision.ops import batched_nms

from damex.__main__ import main
from damex.datasets.label_space import LabelSpace
from damex.datasets.pixels import to_8_bits
from damex.errors import ConfigError, DataError
from damex.inference import media
from damex.inference.media import frames_of
from damex.inference.predictor import Predictor
from damex.models.insertion import moe_blocks
from tests.test_inference.conftest import BEST, SPACE


def everything(predictor, images, **options):
    return predictor(images, min_score=0.0, **options)


def assert_same(one, other):
    assert one.names == other.names
    np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)
    np.testing.assert_allclose(one.boxes, other.boxes, atol=1e-3)


def test_classes_and_datasets_travel_in_the_checkpoint(predictor):
    assert predictor.classes == SPACE.classes
    assert predictor.datasets == {
        "street": ("car", "person"),
        "park": ("person", "dog"),
        "sky": ("kite",),
    }
    assert predictor.can_tell


@pytest.mark.parametrize("change", [dict(datasets=5), dict(classes=("car",))])
def test_datasets_that_do_not_fit_together_are_refused(save, change):
    path = save()
    content = torch.load(path, weights_only=False)
    content["meta"]["dataset_meta"] |= change
    torch.save(content, path)
    with pytest.raises(DataError, match="is damaged: the classes and datasets"):
        Predictor(path)


@pytest.mark.parametrize("key", ["classes", "datasets"])
def test_datasets_of_another_detector_are_refused(save, key):
    """They would index experts, or rows of the classifier, that it does not have."""
    path = save()
    content = torch.load(path, weights_only=False)
    space = content["meta"]["dataset_meta"]
    more = dict(space["datasets"][0], name="more", group="more")
    added = dict(
        classes=(*space["classes"], "more"), datasets=[*space["datasets"], more]
    )
    space[key] = added[key]
    torch.save(content, path)
    with pytest.raises(DataError, match="groups, its detector others"):
        Predictor(path)


def test_auto_looks_for_the_classes_of_the_most_probable_dataset(predictor, photos):
    seen = everything(predictor, sorted(photos.rglob("*.*")))
    assert len(seen) == 3
    for one in seen:
        assert sum(one.probabilities.values()) == pytest.approx(1.0)
        assert one.confidence == one.probabilities[one.dataset]
        assert one.confidence == max(one.probabilities.values())
        assert set(one.names) <= set(predictor.datasets[one.dataset])
        assert len(one.scores) > 0
        assert (np.diff(one.scores) <= 0).all()


def test_the_routers_say_which_dataset_it_is(predictor, photos, records):
    """Their mean over tokens, then over layers."""
    (one,) = predictor(photos / "a.png")
    layers = [r.logits_VE.softmax(1).mean(0) for r in records.values()]
    expected = torch.stack(layers).mean(0).tolist()
    assert list(one.probabilities.values()) == pytest.approx(expected, abs=1e-6)


def test_all_keeps_all_classes(predictor, photos):
    (one,) = everything(predictor, photos / "a.png", dataset="all")
    assert one.dataset is None
    for own in predictor.datasets.values():
        assert not set(one.names) <= set(own)
    assert one.confidence is not None


def test_boxes_end_where_the_image_ends_not_at_its_padding(save, photos):
    path = save()
    checkpoint = torch.load(path, weights_only=False)
    config = Config.fromstring(checkpoint["meta"]["cfg"], ".py")
    config.test_dataloader.dataset.pipeline.insert(2, dict(type="Pad", size=(96, 96)))
    checkpoint["meta"]["cfg"] = config.pretty_text
    for name, value in checkpoint["state_dict"].items():
        if "reg_branches" in name and name.endswith("4.bias"):
            value[2:] = 20.0  # width and height of the whole canvas
    torch.save(checkpoint, path)
    sizes = {"a.png": (96, 64), "b.jpg": (40, 60)}
    for name, size in sizes.items():
        (one,) = everything(Predictor(path, device="cpu"), photos / name)
        assert len(one.boxes) > 0
        assert (one.boxes >= 0).all()
        np.testing.assert_array_equal(one.boxes[:, 2:].max(0), size)


def test_a_named_dataset_chooses_classes_and_experts(save, photos):
    """Whatever other experts and rows of other classes hold changes nothing."""
    path = save()
    predictor, other = Predictor(path, device="cpu"), Predictor(path, device="cpu")
    for block in moe_blocks(other._detector):
        for value in block.moe.experts.parameters():
            value.data[[0, 2]] = 1e3
    for branch in other._detector.bbox_head.cls_branches:
        branch.weight.data[[0, 3]] = 50.0
        branch.bias.data[[0, 3]] = 50.0
    for name in ("a.png", "b.jpg"):
        (one,) = everything(predictor, photos / name, dataset="park")
        (same,) = everything(other, photos / name, dataset="park")
        assert one.dataset == "park"
        assert set(one.names) == {"person", "dog"}
        assert one.probabilities == {}
        assert_same(one, same)
    (sky,) = everything(predictor, photos / "a.png", dataset="sky")
    assert set(sky.names) == {"kite"}


def test_threads_share_a_predictor(predictor, photos):
    """With the routes and the classes of their own images."""
    images, names = sorted(photos.rglob("*.*")), ("park", "sky", "auto", "all")
    alone = [everything(predictor, images, dataset=name) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        jobs = [
            pool.submit(everything, predictor, images, dataset=name, batch_size=1)
            for name in names * 3
        ]
    for job, expected in zip(jobs, alone * 3, strict=True):
        for one, same in zip(job.result(), expected, strict=True):
            assert_same(one, same)
            assert one.probabilities == pytest.approx(same.probabilities, abs=1e-5)


def test_a_name_is_forgotten_after_the_call(predictor, photos):
    before = everything(predictor, photos / "a.png")
    everything(predictor, photos / "a.png", dataset="sky")
    assert_same(everything(predictor, photos / "a.png")[0], before[0])


def test_experts_that_no_dataset_can_choose_leave_the_classes(save, photos):
    moe = {**BEST, "gate": dict(type="DenseSoftmaxGate"), "image_vote": False}
    predictor = Predictor(save(moe=moe), device="cpu")
    (one,) = everything(predictor, photos / "a.png", dataset="park")
    assert set(one.names) == {"person", "dog"}


def test_batches_change_nothing(predictor, photos):
    rng = np.random.default_rng(0)
    shapes = [(64, 96), (96, 30), (64, 96), (30, 96), (64, 96), (96, 30), (64, 64)]
    images = [rng.integers(0, 256, (*one, 3), dtype=np.uint8) for one in shapes]
    images[1] //= 4
    alone = [everything(predictor, image)[0] for image in images]
    rows = [list(one.probabilities.values()) for one in alone]
    assert np.abs(np.subtract(rows, rows[0])).max(1)[1:].min() > 1e-3
    for one, same in zip(
        everything(predictor, images, batch_size=3), alone, strict=True
    ):
        assert_same(one, same)
        assert one.dataset == same.dataset
        assert one.probabilities == pytest.approx(same.probabilities, abs=1e-5)


def test_an_array_is_what_a_file_is(predictor, photos):
    rgb = cv2.imread(str(photos / "a.png"))[..., ::-1]
    (one,) = everything(predictor, rgb)
    (same,) = everything(predictor, str(photos / "a.png"))
    assert (one.path, same.path) == (None, photos / "a.png")
    assert (one.width, one.height) == (same.width, same.height) == (96, 64)
    assert_same(one, same)


def test_images_of_pillow_and_of_16_bits_are_seen_as_files_are(predictor, photos):
    deep = photos / "deep.png"
    ramp = np.arange(96 * 64).reshape(64, 96).astype(np.uint16) // 4 + 7000
    Image.fromarray(ramp).save(deep)
    with Image.open(photos / "a.png") as image:
        seen = everything(predictor, image)
        palette = everything(predictor, image.convert("P").convert("RGBA"))
    assert_same(seen[0], everything(predictor, photos / "a.png")[0])
    assert (seen[0].path, palette[0].width) == (None, 96)
    (one,) = everything(predictor, deep)
    with Image.open(deep) as image:
        assert_same(everything(predictor, image)[0], one)
    gray, _ = to_8_bits(ramp)
    assert_same(everything(predictor, np.stack([gray] * 3, axis=2))[0], one)


def test_depth_is_said_once(photos, monkeypatch):
    said = []
    monkeypatch.setattr(media, "print_log", lambda text, **_: said.append(text))
    for name in ("a.tif", "b.tif"):
        values = np.arange(96 * 64, dtype=np.uint16).reshape(64, 96)
        Image.fromarray(values).save(photos / name)
    inputs = media.Inputs([dict(type="LoadImageFromFile")])
    for name in ("a.png", "a.tif", "b.tif"):
        [*inputs.each(photos / name)]
    (text,) = said
    assert "a.tif has more than 8 bits" in text
    assert "6 to 6137" in text  # percentiles 0.1 and 99.9 of 0 to 6143


@pytest.mark.parametrize(
    ("option", "shape", "kind"),
    [
        (dict(), (64, 96, 3), np.uint8),
        (dict(color_type="grayscale"), (64, 96), np.uint8),
        (dict(to_float32=True), (64, 96, 3), np.float32),
    ],
)
def test_arrays_and_frames_are_loaded_like_files(photos, clip, option, shape, kind):
    inputs = media.Inputs([dict(type="LoadImageFromFile", **option)])
    with Image.open(photos / "a.png") as image:
        image = image.convert("RGB")
    image.save(photos / "rgb.png")
    sources = [photos / "rgb.png", image, np.asarray(image)]
    file, *others = (inputs(source)["pixels"] for source in sources)
    frame = next(inputs.each(clip))["pixels"]
    for found in (file, *others, frame):
        assert (found.shape, found.dtype) == (shape, kind)
    for found in others:
        np.testing.assert_array_equal(found, file)


def test_broken_images_are_left_out_or_raise(predictor, photos):
    (photos / "text.png").write_text("not an image")
    cut = photos / "b.jpg"
    cut.write_bytes(cut.read_bytes()[:-200])
    problems = []
    paths = [photos / name for name in ("text.png", "a.png", "b.jpg", "none.png")]
    seen = [*predictor.stream(paths, "auto", 0.3, 2, skip=problems.append)]
    assert [one.path for one in seen] == [photos / "a.png"]
    said = [str(problem) for problem in problems]
    assert "text.png is not an image that can be read" in said[0]
    assert "b.jpg cannot be decoded to its end" in said[1]
    assert "none.png does not exist" in said[2]
    with pytest.raises(DataError, match=r"text\.png"):
        predictor(paths)


@pytest.mark.parametrize("options", [{}, dict(dataset="street", tile=64)])
def test_images_with_too_few_cells_are_left_out(save, photos, options):
    """Also those seen through windows."""
    predictor = Predictor(save(num_queries=70), device="cpu")
    Image.new("RGB", (400, 8)).save(photos / "thin.png")
    problems, paths = [], [photos / name for name in ("a.png", "thin.png", "b.jpg")]
    seen = [*predictor.stream(paths, **options, skip=problems.append)]
    assert [one.path.name for one in seen] == ["a.png", "b.jpg"]
    (problem,) = map(str, problems)
    assert problem.startswith(f"{photos / 'thin.png'}: it has ")
    assert "feature map cells, fewer than" in problem


def test_datasets_that_share_experts_are_one(save, photos):
    space = dataclasses.replace(SPACE, groups=("street", "green", "green"))
    predictor = Predictor(save(space=space), device="cpu")
    (one,) = everything(predictor, photos / "a.png")
    assert list(one.probabilities) == ["street", "green"]
    named = everything(predictor, photos / "a.png", dataset="sky")[0]
    assert set(named.names) == {"kite"}


def test_a_detector_that_was_not_taught_has_to_be_told(save, photos):
    moe = {**BEST, "losses": [], "image_vote": False}
    predictor = Predictor(save(moe=moe), device="cpu")
    assert not predictor.can_tell
    with pytest.warns(match="its classes: street, park, sky") as caught:
        (auto,) = everything(predictor, photos / "a.png")
    said = [one for one in caught if "its classes" in str(one.message)]
    assert [warning.filename for warning in said] == [__file__]
    (one,) = everything(predictor, photos / "a.png", dataset="all")
    assert (one.dataset, one.confidence) == (None, None)
    assert_same(auto, one)


def test_the_only_dataset_is_looked_for(save, photos):
    space = LabelSpace(SPACE.classes, ("park",), ({"dog": "dog"},), ("park",))
    predictor = Predictor(save(space=space, moe=False), device="cpu")
    assert (predictor.can_tell, predictor.auto_note) == (False, None)
    (one,) = everything(predictor, photos / "a.png")
    assert (one.dataset, set(one.names)) == ("park", {"dog"})


@pytest.mark.parametrize(
    ("images", "options", "text"),
    [
        (None, {}, "must be a path, a PIL image, or a uint8 .*, got NoneType"),
        ([None], {}, "got NoneType"),
        (torch.zeros(2, 2, 3), {}, "got Tensor"),
        (np.zeros((0, 4, 3), np.uint8), {}, r"got uint8 of shape \(0, 4, 3\)"),
        (np.zeros((2, 2, 4), np.uint8), {}, r"got uint8 of shape \(2, 2, 4\)"),
        (np.zeros((2, 2, 3), np.float32), {}, r"got float32 of shape \(2, 2, 3\)"),
        (np.zeros((1, 4000, 3), np.uint8), {}, r"array \(4000 x 1 px\) cannot be re"),
        ("{folder}", {}, "photos is a folder; give the files in it"),
        ("{folder}/a.png", dict(dataset="prak"), "no dataset 'prak'; .* 'park'"),
        ("{folder}/a.png", dict(batch_size=0), "batch_size must be an int.* got 0"),
        ("{folder}/a.png", dict(min_score=1.5), r"min_score must be in \[0, 1\]"),
        ("{folder}/a.png", dict(min_score=np.nan), "min_score must be .* got nan"),
    ],
)
def test_what_cannot_be_looked_at_is_named(predictor, photos, images, options, text):
    if isinstance(images, str):
        images = images.format(folder=photos)
    with pytest.raises(ValueError, match=text):  # DataError is one
        predictor(images, **options)


def test_classes_are_of_the_dataset_whose_experts_were_used(
    predictor, photos, monkeypatch
):
    """Votes (summed logarithms) and probabilities (means) may differ."""
    votes = torch.tensor([[-1.0, -8.0, -9.0]])  # of the last layer, for street
    context = type(predictor._detector.routing)
    monkeypatch.setattr(context, "votes_BG", property(lambda self: votes))
    (one,) = everything(predictor, photos / "a.png")
    assert max(one.probabilities, key=one.probabilities.get) != "street"
    assert (one.dataset, {*one.names}) == ("street", {"car", "person"})
    assert one.confidence == one.probabilities["street"]


def test_a_dataset_head_is_asked_first(save, photos):
    coverage = SPACE.coverage()
    path = save(dataset_head=dict(loss_weight=0.1), label_coverage=coverage)
    predictor = Predictor(path, device="cpu")
    predictor._detector.awareness.head.bias.data = torch.tensor([0.0, 9.0, 0.0])
    (one,) = predictor(photos / "a.png")
    assert one.dataset == "park"
    assert one.confidence == pytest.approx(np.exp(9) / (np.exp(9) + 2), abs=1e-4)


def test_checkpoints_that_say_too_little_are_refused(save, tmp_path):
    with pytest.raises(ConfigError, match="holds no config"):
        Predictor(save(drop_meta=("cfg",)))
    with pytest.raises(ConfigError, match="without a mixture"):
        Predictor(save(drop_meta=("dataset_meta",)))
    content = torch.load(path := save(), weights_only=False)
    content["meta"]["dataset_meta"] = dict(classes=("car",))
    torch.save(content, path)
    with pytest.raises(ConfigError, match="without a mixture"):
        Predictor(path)
    with pytest.raises(DataError, match="is missing in"):
        Predictor(tmp_path / "none.pth")
    with pytest.raises(ConfigError, match="a 'DINO', which is not a detector of damex"):
        Predictor(edited(save(), lambda text: text.replace("'MoEDINO'", "'DINO'")))


def edited(path, change):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["meta"]["cfg"] = change(checkpoint["meta"]["cfg"])
    torch.save(checkpoint, path)
    return path


def test_experts_of_several_processes_are_all_there(save, photos):
    """``moe.expert_parallel`` says who held them in training; a checkpoint has all."""
    path = save()
    before = everything(Predictor(path, device="cpu"), photos / "a.png")
    words = ("image_vote=True", "image_vote=True, expert_parallel=2")
    predictor = Predictor(edited(path, lambda text: text.replace(*words)), device="cpu")
    assert_same(everything(predictor, photos / "a.png")[0], before[0])


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
@pytest.mark.parametrize("command", ["predict", "experts"])
def test_a_device_that_is_not_there_is_named(save, photos, capsys, command, device):
    words = [str(save()), *["--images"] * (command == "experts"), str(photos)]
    capsys.readouterr()
    assert main([command, *words, "--device", device]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"--device {device}: " in line
    assert "; use cpu" in line


def test_frames_of_a_video_are_seen_as_images_are(predictor, clip):
    seen = everything(predictor, clip, batch_size=2)
    arrays = [frame[..., ::-1] for frame in frames_of(clip)]
    assert [(one.path, one.frame) for one in seen] == [(clip, n) for n in range(5)]
    for one, other in zip(seen, everything(predictor, arrays), strict=True):
        assert (one.width, one.height, other.frame) == (96, 64, None)
        assert len(one.scores) > 0
        assert_same(one, other)


@pytest.fixture
def with_mixture(save):
    """A predictor whose checkpoint has a mixture."""

    def make(mixture, **changes):
        path = save(**changes)
        content = torch.load(path, weights_only=True)
        config = Config.fromstring(content["meta"]["cfg"], ".py")
        config.mixture = mixture
        content["meta"]["cfg"] = config.pretty_text
        torch.save(content, path)
        return Predictor(path, device="cpu")

    return make


def picture(width, height):
    return np.random.default_rng(5).integers(0, 256, (height, width, 3), np.uint8)


def test_a_dataset_with_a_tile_is_seen_through_windows(with_mixture, predictor):
    """As its windows were shown one by one, and shifted and merged by hand."""
    entries = [dict(name="street", tile=40), dict(name="park", tile=40)]
    tiled = with_mixture([*entries, dict(name="sky")])
    image = picture(70, 40)
    expected = [[], [], []]
    for left in (0, 30):  # they share a quarter
        crop = np.ascontiguousarray(image[:, left : left + 40])
        (one,) = everything(predictor, crop, dataset="street")
        expected[0].append(one.boxes + np.float32([left, 0, left, 0]))
        expected[1].append(one.scores)
        expected[2].append(one.labels)
    rows = [torch.tensor(np.concatenate(column)) for column in expected]
    kept = batched_nms(*rows, iou_threshold=0.5)
    (found,) = everything(tiled, image, dataset="street")
    assert 0 < len(kept) < len(rows[0])
    np.testing.assert_allclose(found.boxes, rows[0][kept], atol=1e-3)
    np.testing.assert_allclose(found.scores, rows[1][kept], atol=1e-6)
    assert found.labels.tolist() == rows[2][kept].tolist()
    assert (found.width, found.height, found.probabilities) == (70, 40, {})
    for name in ("sky", "all"):  # without a tile, or with different ones
        (one,) = everything(tiled, image, dataset=name)
        assert_same(one, *everything(predictor, image, dataset=name))


SHARED = dataclasses.replace(SPACE, groups=("street", "green", "green"))


@pytest.mark.parametrize(
    ("tiles", "options", "said"),
    [
        ([40, 40, 40], dict(moe=False), None),
        ([40, None, 32], dict(moe=False), "street, sky"),
        ([40, None, 32], {}, None),  # each image is seen as its dataset is
        ([40, None, 32], dict(space=SHARED), "sky"),
        ([40, 32, 32], dict(space=SHARED), None),
    ],
)
def test_windows_that_datasets_do_not_share_are_said(
    with_mixture, tiles, options, said
):
    names = ("street", "park", "sky")
    mixture = [dict(name=n, tile=t) for n, t in zip(names, tiles, strict=True)]
    note = with_mixture(mixture, **options).auto_note or ""
    assert ("through windows" in note) == (said is not None)
    assert said is None or f"it saw {said} through windows, and now it sees" in note


def test_evaluation_looks_as_the_training_did(with_mixture, monkeypatch):
    tiled = with_mixture([dict(name="street", tile=40), dict(name="park")])
    monkeypatch.setattr(
        type(tiled.stored), "evaluate", lambda self, detector, loader, **_: loader
    )
    street, park = dict(name="street", root="a"), dict(name="park", root="b")
    mixture = dict(type="MixtureDataset", on_bad_box="drop")
    tiled.stored.config["val_dataloader"] = dict(dataset=mixture)
    loader = tiled.evaluate([street, dict(street, tile=None), park])
    assert [one["tile"] for one in loader["dataset"]["datasets"]] == [40, None, None]
    assert loader["dataset"]["on_bad_box"] == "drop"


@pytest.mark.parametrize("batch_size", [1, 8])
def test_the_whole_image_tells_the_dataset_that_has_a_tile(
    with_mixture, predictor, photos, batch_size
):
    paths = sorted(photos.rglob("*.*"))
    whole = everything(predictor, paths)
    tiled = with_mixture([dict(name=name, tile=32) for name in predictor.datasets])
    found = everything(tiled, paths, batch_size=batch_size)
    for one, other in zip(found, whole, strict=True):
        assert one.dataset == other.dataset
        assert one.probabilities == pytest.approx(other.probabilities)
        (told,) = everything(tiled, one.path, dataset=one.dataset)
        assert_same(one, told)
        assert one.path == other.path


def test_windows_can_be_chosen_at_prediction(with_mixture, predictor, photos):
    paths = sorted(photos.rglob("*.*"))
    names = [dict(name=name) for name in predictor.datasets]
    tiled = with_mixture([dict(one, tile=32) for one in names])
    for dataset in ("auto", "street"):
        seen = everything(tiled, paths, dataset=dataset)
        chosen = everything(predictor, paths, dataset=dataset, tile=32)
        whole = everything(tiled, paths, dataset=dataset, tile=None)
        before = everything(predictor, paths, dataset=dataset)
        for rows in (zip(seen, chosen, strict=True), zip(whole, before, strict=True)):
            for one, other in rows:
                assert_same(one, other)
    for side in (15, True, "all", 32.0):
        with pytest.raises(ConfigError, match=f"for whole images, got {side!r}"):
            predictor(paths, tile=side)


@pytest.mark.parametrize("mixture", [3, [3], [dict(name="street", tile="x")]])
def test_a_strange_mixture_has_no_tile(with_mixture, predictor, mixture):
    image = picture(70, 40)
    (one,) = everything(with_mixture(mixture), image, dataset="street")
    assert_same(one, *everything(predictor, image, dataset="street"))
