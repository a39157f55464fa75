"""An ONNX graph answers as mmdet's detector that it was made of."""

import copy
import json
import re
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
from mmdet.models.detectors import DeformableDETR
from PIL import Image
from timm.layers import Conv2dSame
from torch import nn

import damex
from damex.__main__ import main
from damex.errors import ConfigError
from damex.inference.media import Inputs
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint
from damex.workbench.export import onnx_graph
from damex.workbench.export.dense_experts import voted_detector
from damex.workbench.export.export import (
    Detections,
    compare,
    detections_of_graph,
    detections_of_mmdet,
    difference,
    start_session,
)
from damex.workbench.export.onnx_graph import (
    DetectorGraph,
    check_steps,
    resized,
    to_onnx,
)
from damex.workbench.export.specialist import extract
from damex.workbench.export.symbolic_sizes import unroll
from tests.test_inference.conftest import BEST, PIPELINE, InTorch, spread_scores

ROOT = Path(__file__).parents[2]
BGR = dict(
    type="DetDataPreprocessor",
    mean=[10.0, 120.0, 200.0],
    std=[30.0, 60.0, 90.0],
    bgr_to_rgb=False,
    pad_size_divisor=32,
    pad_value=1,
)
# Width and height of images, some larger and some smaller than the 96 x 64 pixels to
# which they are resized.
SIZES = [
    *[(60, 60), (192, 144), (48, 64), (210, 90), (40, 120)],
    *[(31, 17), (64, 96), (110, 50)],
]
LOAD, RESIZE, _, PACK = PIPELINE


def graph_of(checkpoint, *, dataset="park", size=None, pipeline=None):
    """A graph of a specialist, as the command makes it."""
    stored = DetectorCheckpoint.read(str(checkpoint))
    if size is not None:
        stored = stored.resized(size)
    specialist = extract(stored, dataset)
    pipeline = pipeline or stored.pipeline
    return DetectorGraph(specialist.build(), pipeline).eval(), specialist.build()


def pictures(size, count, *, seed):
    """Images of blocks of colour, (count, H, W, 3)."""
    width, height = size
    rng = np.random.default_rng(seed)
    shape = (count, height // 4 + 1, width // 4 + 1, 3)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8).repeat(4, 1).repeat(4, 2)
    return blocks[:, :height, :width]


def upper_half(answers):
    """Their least score: among the last, of equal scores, rounding chooses."""
    return float(np.median(answers.scores[answers.scores > 0]))


def check(graph, detector, *, session=None, first_seed=0):
    """Hold a graph to a detector, on batches that it was not made with."""
    if session is None:
        content = to_onnx(graph, dict(classes=("dog", "person")))
        assert str(ROOT).encode() not in content
        session = start_session(content)
    labels = graph.votes.labels if graph.votes else None
    seen = []
    for seed, size in enumerate(SIZES):
        images = pictures(size, 1 + seed % 3, seed=first_seed + seed)
        found = detections_of_graph(session, images)
        for image, other in zip(images, found, strict=True):
            inputs = Inputs(graph.pipeline)
            one = detections_of_mmdet(inputs, image, detector=detector, labels=labels)
            assert one.boxes.shape == other.boxes.shape
            scores, boxes = difference(one, other, least=upper_half(one))
            assert scores < 2e-5
            assert boxes / max(size) < 1e-4
        seen += found
    apart = [np.abs(one.scores - seen[0].scores).max() for one in seen[1:]]
    assert min(apart) > 2e-4  # nothing of the example images is left
    return session


def test_another_size_and_a_class_alone(save, tmp_path):
    """50 queries and 1 class are 50 detections; no image is padded."""
    checkpoint = save(data_preprocessor=dict(BGR, pad_size_divisor=1))
    out, size = tmp_path / "made.onnx", (60, 100)
    detector = damex.load(checkpoint, device="cpu")
    assert "image_size: Width and height" in detector.export.__doc__
    detector.export(out, dataset="sky", image_size=size)
    session = start_session(out.read_bytes())
    check(*graph_of(checkpoint, dataset="sky", size=size), session=session)
    known = session.get_modelmeta().custom_metadata_map
    known = {key: json.loads(value) for key, value in known.items()}
    assert (known["image_size"], known["dataset"]) == ([60, 100], "sky")
    assert known["classes"] == ["kite"]
    shapes = {one.name: one.shape for one in session.get_outputs()}
    assert shapes == dict(
        boxes=["batch", 50, 4], scores=["batch", 50], labels=["batch", 50]
    )
    (images,) = session.get_inputs()
    shape = ["batch", "height", "width", 3]
    assert (images.type, images.shape) == ("tensor(uint8)", shape)


class Part(torch.nn.Module):
    """What a graph does until ``run``'s result; exported in seconds."""

    outputs = ("found",)

    def __init__(self, graph, run):
        super().__init__()
        self.scale, self.keep_ratio, self.run = graph.scale, graph.keep_ratio, run

    def forward(self, images):
        return self.run(images)


def pixels_of(graph):
    return Part(graph, lambda images: graph.prepare(images)[0])


PREPARED = {
    "stretched": [dict(type="Resize", scale=(90, 70))],
    "one number": [dict(type="Resize", scale=70, keep_ratio=True)],
    "a size": [RESIZE, dict(type="Pad", size=(128, 100))],
    "a square": [RESIZE, dict(type="Pad", pad_to_square=True, pad_val=dict(img=114))],
    "a divisor": [RESIZE, dict(type="Pad", size_divisor=40)],
    "both": [RESIZE, dict(type="Pad", pad_to_square=True, size_divisor=40)],
}


@pytest.mark.parametrize("kind", PREPARED)
def test_images_are_prepared_as_in_the_training(save, kind):
    """A border of a Pad counts as image, and the padding of a batch does not."""
    pipeline = [LOAD, *PREPARED[kind], PACK]
    graph, detector = graph_of(save(data_preprocessor=BGR), pipeline=pipeline)
    check(graph, detector, session=InTorch(graph))
    if kind in ("one number", "a divisor"):
        return  # whole graphs are exported with the first, "both" has the other
    session = start_session(to_onnx(pixels_of(graph), {}))
    for seed, size in enumerate(SIZES):
        images = pictures(size, 1 + seed % 3, seed=seed)
        (found,) = session.run(None, dict(images=images))
        for image, pixels in zip(images, found, strict=True):
            data = Inputs(pipeline)(image)
            data = {key: [data[key]] for key in ("inputs", "data_samples")}
            (expected,) = detector.data_preprocessor(data)["inputs"]
            np.testing.assert_allclose(pixels, expected, atol=1e-6)


def test_a_masked_canvas_of_another_size(save):
    """The canvas is as large as the longest side, in whole strides."""
    graph, detector = graph_of(
        save(data_preprocessor=dict(BGR, pad_size_divisor=96)), size=(120, 100)
    )
    assert graph.detector.data_preprocessor.pad_size_divisor == 128
    check(graph, detector, session=InTorch(graph))


LOW_RANK = dict(
    experts=dict(type="LowRankExperts", rank=3), shared_expert=dict(type="SharedExpert")
)
KINDS = {
    "whole FFNs": {},
    "low-rank maps": LOW_RANK,
    "a norm before": dict(block=dict(norm="pre"), router=dict(type="CosineRouter")),
}


def mixture_graph(checkpoint, kind=DetectorGraph):
    """The graph of a whole mixture, and the detector that it was made of."""
    stored = DetectorCheckpoint.read(str(checkpoint))
    labels = stored.space.labels_by_group()
    detector, votes = voted_detector(stored.build(), labels, stored.path)
    return kind(detector, stored.pipeline, votes).eval(), stored.build()


def save_mixture(save, **moe):
    """Experts far apart, so that which one an image gets makes a difference."""
    path = save(moe={**BEST, **moe})
    content = torch.load(path, weights_only=False)
    generator = torch.Generator().manual_seed(2)
    for key, value in content["state_dict"].items():
        if ".moe.experts." in key:
            value += torch.randn(value.shape, generator=generator) * 0.2
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("kind", "exported"),
    [
        *((kind, False) for kind in KINDS),
        # The command's test exports whole FFNs; affine maps are looked up like these.
        pytest.param("low-rank maps", True, marks=pytest.mark.slow),
        pytest.param("a norm before", True, marks=pytest.mark.slow),
    ],
)
def test_a_whole_mixture_answers_as_in_damex(save, kind, exported):
    graph, detector = mixture_graph(save_mixture(save, **KINDS[kind]))
    # Rounding ranks two queries of an image of seed 5.
    first_seed = 10 if kind == "whole FFNs" else 0
    session = None if exported else InTorch(graph)
    session = check(graph, detector, session=session, first_seed=first_seed)
    images = pictures((90, 50), 16, seed=9).copy()
    images[4:8] //= 4
    images[8:12, ..., 0] = 255
    images[12:, ..., 1:] = 0
    (shares_BG,) = session.run(["datasets"], dict(images=images))
    np.testing.assert_allclose(shares_BG.sum(1), 1.0, atol=1e-5)
    assert len({*shares_BG.argmax(1).tolist()}) > 1
    inputs, labels = Inputs(graph.pipeline), graph.votes.labels
    for image, other in zip(images, detections_of_graph(session, images), strict=True):
        one = detections_of_mmdet(inputs, image, detector=detector, labels=labels)
        assert max(difference(one, other, least=upper_half(one))) < 1e-2


def test_openvino_detects_what_onnxruntime_does(save, tmp_path):
    openvino = pytest.importorskip("openvino")
    graph, _ = mixture_graph(save_mixture(save))
    made = tmp_path / "made.onnx"
    made.write_bytes(to_onnx(graph, {}))
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(made, "CPU", exact)
    session = start_session(made.read_bytes())
    for seed, size in enumerate(SIZES[1:]):  # none is square
        images = pictures(size, 1 + seed % 3, seed=seed)
        outputs = [*model(dict(images=images)).values()]
        for one, other in zip(
            [Detections(*one) for one in zip(*outputs[:3], strict=True)],
            detections_of_graph(session, images),
            strict=True,
        ):
            scores, boxes = difference(one, other, least=upper_half(one))
            assert scores < 1e-4
            assert boxes / max(size) < 1e-4
        (shares_BG,) = session.run(["datasets"], dict(images=images))
        np.testing.assert_allclose(outputs[3], shares_BG, atol=1e-4)


@pytest.mark.slow
def test_a_backbone_that_pads_by_itself(save):
    preprocessor = dict(BGR, pad_size_divisor=1)
    base = "moe-dino-mini_efficientnet-lite0"
    graph, detector = mixture_graph(save(base=base, data_preprocessor=preprocessor))
    check(graph, detector, session=InTorch(graph))
    extract = graph.detector.extract_feat
    part = Part(graph, lambda images: extract(graph.prepare(images)[0]))
    part.outputs = tuple("abcd")
    session = start_session(to_onnx(part, {}))
    for seed, size in enumerate(SIZES):
        images = pictures(size, 2, seed=seed)
        with torch.no_grad():
            expected = part(torch.from_numpy(images))
        found = session.run(None, dict(images=images))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


UNWRITTEN = {
    "each token alone": (dict(image_vote=False), "train with moe.image_vote=True"),
    "two experts": (dict(gate=dict(type="TopKGate", k=2)), "its gate has k=2"),
    "dense": (False, "has no experts, or none that were tr"),
    "untaught": (dict(losses=[]), "has no experts, or none that were tr"),
}


@pytest.mark.parametrize(("moe", "words"), UNWRITTEN.values(), ids=UNWRITTEN)
def test_mixtures_that_no_graph_follows(save, moe, words):
    path = save(moe=False if moe is False else {**BEST, "num_experts": 6, **moe})
    with pytest.raises(ConfigError, match=words):
        mixture_graph(path)


@pytest.mark.parametrize(
    ("refine", "exported"),
    [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)],
)
def test_deformable_detr_without_stages(build_mmdet, refine, exported):
    detector = build_mmdet("MoEDeformableDETR")
    # mmdet's own class, which has no mixture to ask for.
    detector.__class__ = DeformableDETR
    detector.with_box_refine = refine
    spread_scores(detector)
    mmdets = copy.deepcopy(detector.eval())
    graph = DetectorGraph(detector, [LOAD, RESIZE, PACK]).eval()
    check(graph, mmdets, session=None if exported else InTorch(graph))


def test_the_command_and_its_file(save, tmp_path, capsys):
    """Files of any shape get the detections of ``damex predict``."""
    checkpoint, out = save_mixture(save), tmp_path / "new" / "made.onnx"
    capsys.readouterr()  # the log of building a detector
    assert export(checkpoint, out, dataset=None) == 0
    written, about, compared, times = capsys.readouterr().out.splitlines()
    assert written.startswith(f"written: {out} ({out.stat().st_size / 1e6:.1f} MB), ")
    assert written.endswith(" 96 x 64 pixels at most")
    assert about.startswith("3 datasets, 4 classes, ")
    assert ": scores differ by " in compared
    assert "noise (no validation image is here), in 6 shapes" in compared
    assert re.search(r": [\d.]+ in onnxruntime, [\d.]+ in mmdet$", times)
    session, predictor = start_session(out.read_bytes()), Predictor(checkpoint)
    known = session.get_modelmeta().custom_metadata_map
    known = {key: json.loads(value) for key, value in known.items()}
    assert (known["image_size"], known["keep_ratio"]) == ([96, 64], True)
    assert known["datasets"] == ["street", "park", "sky"]
    assert known["labels"] == dict(street=[0, 1], park=[1, 2], sky=[3])
    names = ["boxes", "scores", "labels", "datasets"]
    assert [one.name for one in session.get_outputs()] == names
    for seed, size in enumerate(SIZES):
        path = tmp_path / "image.png"
        (image,) = pictures(size, 1, seed=seed)
        Image.fromarray(image).save(path)
        (one,) = predictor(path, min_score=0.0)
        labels = np.array([known["classes"].index(name) for name in one.names])
        expected = Detections(one.boxes, one.scores, labels)
        (found,) = detections_of_graph(session, image[None])
        scores, boxes = difference(expected, found, least=upper_half(expected))
        assert scores < 1e-4
        assert boxes < 1e-2


def test_resizing_is_that_of_opencv():
    rng = np.random.default_rng(0)
    sides = [
        *rng.integers(1, 300, (40, 4)).tolist(),
        [8, 6, 16, 12],
        [300, 200, 150, 100],
    ]
    for height, width, new_height, new_width in sides:
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        (found,) = resized(torch.from_numpy(image[None]), [new_height, new_width])
        expected = cv2.resize(image, (new_width, new_height))
        np.testing.assert_array_equal(found.permute(1, 2, 0), expected)


def resize(**options):
    return dict(type="Resize", **options)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([dict(type="RandomFlip"), RESIZE], "applies LoadImageFromFile, Ran"),
        ([dict(type="Pad", size=(800, 800)), RESIZE], "in this order"),
        ([PACK], "it can follow LoadImageFromFile, Resize"),
        ([resize(scale_factor=0.5)], r"its Resize has no scale=\(width, height\)"),
        ([RESIZE, dict(type="Pad", padding_mode="reflect")], "mode': 'reflect'"),
        ([RESIZE, dict(type="Pad", pad_val=dict(img=(1, 2, 3)))], r"\(1, 2, 3\)"),
    ],
)
def test_pipelines_that_no_graph_follows(steps, words):
    with pytest.raises(ConfigError, match=words):
        check_steps([LOAD, *steps])


def test_differences_are_to_the_nearest_of_the_class():
    """Order says nothing; an answer that only one has is infinitely far."""
    rows = np.array([[0.0, 0, 9, 9], [10, 10, 19, 19], [20, 20, 29, 29]])
    one = Detections(rows, np.array([0.8, 0.8, 0.1]), np.array([0, 0, 1]))
    swapped = Detections(rows[[1, 0, 2]] + 0.25, np.array([0.8, 0.75, 0.1]), one.labels)
    assert difference(one, swapped, least=0.5) == pytest.approx((0.05, 0.25))
    other = Detections(rows, one.scores, np.array([0, 0, 2]))
    assert difference(one, other, least=0.5) == (0.0, 0.0)
    assert difference(one, other, least=0.0) == (np.inf, np.inf)


def export(checkpoint, out, *more, dataset="park"):
    named = () if dataset is None else ("--dataset", dataset)
    words = ("export", checkpoint, *named, "--out", out, *more)
    return main([str(word) for word in words])


FAULTS = {
    "boxes beside": ("_best", lambda boxes, *rest: (boxes + 0.2, *rest)),
    # Right for images of the shape of the noise, which comes first.
    "one shape": ("_new_size", lambda _: [64, 96]),
}


@pytest.mark.usefixtures("exports_nothing")
@pytest.mark.parametrize(("method", "spoil"), FAULTS.values(), ids=FAULTS)
def test_a_graph_that_answers_otherwise_is_not_written(
    save, tmp_path, capsys, monkeypatch, method, spoil
):
    checkpoint, out = save(), tmp_path / "park.onnx"
    right = getattr(DetectorGraph, method)

    def wrong(*arguments):
        found = right(*arguments)
        return spoil(*found) if method == "_best" else spoil(found)

    monkeypatch.setattr(DetectorGraph, method, wrong)
    assert export(checkpoint, out) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "was not written: on noise" in error
    assert "pixels; allowed are 0.001 and 0.1" in error
    assert not out.exists()


def test_images_too_small_for_the_queries_are_left_out():
    def of_mmdet(image):
        if len(image) < 32:
            raise RuntimeError("selected index k out of range")
        return Detections(np.ones((1, 4)), np.ones(1), np.ones(1))

    small, large = (np.zeros((side, 32, 3), np.uint8) for side in (8, 32))
    assert compare(of_mmdet, of_mmdet, [small, large]).images == 1
    with pytest.raises(ConfigError, match=r"out of range\); try a larger --image-size"):
        compare(of_mmdet, of_mmdet, [small])


def test_one_answer_of_nan_is_not_close():
    def run(score):
        box, label = np.ones((1, 4)), np.ones(1)
        return lambda image: Detections(box, np.array([score(image)]), label)

    images = [np.full((9, 9, 3), value, np.uint8) for value in (1, 0, 1)]
    good, bad = run(lambda _: 1.0), run(lambda image: 1.0 if image.any() else np.nan)
    assert compare(good, good, images).is_close
    assert not compare(good, bad, images).is_close


def test_a_graph_that_fails_on_a_size_is_named():
    class Session:
        def run(self, *_):
            raise ValueError("cannot multiply\nmore")

    with pytest.raises(ConfigError, match=r"of 9 x 7 pixels.*: cannot multiply$"):
        detections_of_graph(Session(), np.zeros((1, 7, 9, 3), np.uint8))


def test_an_operation_that_onnx_has_not(save, monkeypatch):
    graph, _ = graph_of(save())
    monkeypatch.setattr(onnx_graph, "_padded", lambda one, *_: torch.special.i1(one))
    with pytest.raises(ConfigError, match=r"as ONNX .opset 18, torch 2.*bessel_i1"):
        to_onnx(pixels_of(graph), {})


def test_a_size_too_small_for_the_queries(save, tmp_path, capsys):
    checkpoint, out = save(), tmp_path / "park.onnx"
    capsys.readouterr()
    assert export(checkpoint, out, "--image-size", 16, 16) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.endswith("with 16 x 16 pixels; try a larger --image-size.")


def test_missing_and_old_packages_are_named_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(onnx_graph, "find_spec", {"onnxruntime": object()}.get)
    assert export(tmp_path / "none.pth", tmp_path / "park.onnx") == 2
    error = capsys.readouterr().err
    assert "needs onnx 1.17 or newer, and it is not installed; pip install" in error
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    assert export(tmp_path / "none.pth", tmp_path / "park.onnx") == 2
    assert "needs torch 2.9 or newer, and this is 2.8.0+cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "options", "words"),
    [
        ("there.onnx", {}, "there.onnx exists; remove it"),
        ("there.pth", {}, "there.py exists; remove it"),
        ("park.pt", {}, "--out must end in .pth or .onnx or /, got"),
        ("all.pth", dict(dataset=None), "add --dataset NAME"),
    ],
)
def test_targets_that_cannot_be(tmp_path, capsys, out, options, words):
    for name in ("there.onnx", "there.py"):
        (tmp_path / name).write_text("mine")
    assert export(tmp_path / "none.pth", tmp_path / out, **options) == 2
    assert words in capsys.readouterr().err
    assert all(path.read_text() == "mine" for path in tmp_path.iterdir())


def test_a_layer_with_two_names_is_replaced_under_both():
    conv = Conv2dSame(3, 4, 3, stride=2)
    layers = nn.Sequential(conv, nn.Identity(), nn.Sequential(conv))
    before = conv(images := torch.randn(1, 3, 32, 64))
    unroll(layers)
    assert layers[0] is layers[2][0]
    assert torch.equal(layers[0](images), before)


def test_a_size_is_for_onnx_alone(tmp_path, capsys):
    checkpoint, out = tmp_path / "none.pth", tmp_path / "park.pth"
    assert export(checkpoint, out, "--image-size", 96, 64) == 2
    assert "a .pth takes images of any size" in capsys.readouterr().err


def test_detectors_that_no_graph_follows(build_mmdet, save):
    with pytest.raises(ConfigError, match="is a MoEDETR; as ONNX DINO and Deform"):
        DetectorGraph(build_mmdet("MoEDETR"), PIPELINE)
    graph, _ = graph_of(save())
    graph.detector.bbox_head.loss_cls.use_sigmoid = False
    with pytest.raises(ConfigError, match="exclude each other"):
        DetectorGraph(graph.detector, PIPELINE)


@pytest.mark.slow
def test_the_code_of_the_docs_runs_without_torch(save, tmp_path, run_alone, capsys):
    """It prints what `damex predict` finds in a photo on its side, also by windows."""
    page = (ROOT / "docs/guides/exporting.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n([^`]*import onnxruntime[^`]*)```", page)
    checkpoint, room = save(), tmp_path / "room.jpg"
    file = tmp_path / "playroom.onnx"
    assert export(checkpoint, file) == 0
    assert "\npark: 2 classes, " in capsys.readouterr().out
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.fromarray(pictures((210, 90), 1, seed=3)[0]).save(room, exif=exif)
    printed = run_alone(code.replace(">= 0.3", ">= 0.0"), tmp_path, "torch")
    lines = printed.splitlines()
    predictor = Predictor(checkpoint)
    (told,) = predictor(room, dataset="park", min_score=0.0)
    assert (told.width, told.height) == (90, 210)
    assert len(lines) == len(told.names) == 100
    for line, name, score, box in zip(lines[:20], *best_of(told), strict=True):
        words = re.sub(r"[\[\]]", "", line).split()
        assert words[0] == name
        assert [*map(float, words[1:])] == pytest.approx([score, *box], abs=0.06)

    (code,) = re.findall(r"```python\n(TILE = [^`]*)```", page)
    names = dict(session=onnxruntime.InferenceSession(file), np=np)
    exec(code.replace("TILE = 320", "TILE = 64"), names)
    image = pictures((90, 150), 1, seed=3)[0]
    boxes, scores, _ = names["by_windows"](image)
    (found,) = predictor(image, dataset="park", min_score=0.0, tile=64)
    assert len(found.scores) > 100  # of several windows
    assert len(scores) == len(found.scores)
    np.testing.assert_allclose(scores, found.scores, atol=1e-4)
    np.testing.assert_allclose(boxes[:20], found.boxes[:20], atol=0.05)


def best_of(prediction):
    """The 20 best names, scores and boxes."""
    return prediction.names[:20], prediction.scores[:20], prediction.boxes[:20]
