"""An ONNX graph answers as mmdet's detector that it was made of."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.models.detectors import DeformableDETR
from PIL import Image

from damex.__main__ import main
from damex.errors import ConfigError
from damex.inference import Predictor, onnx_graph
from damex.inference.onnx_graph import Canvas, DetectorGraph, Routing, to_onnx
from damex.inference.onnx_parity import (
    Answers,
    answers_of_graph,
    answers_of_mmdet,
    compare,
    difference,
    letterbox,
    start_session,
)
from damex.inference.onnx_routing import voted_detector
from damex.inference.predictor import labels_by_group
from damex.inference.specialist import take_out
from damex.inference.stored import StoredDetector
from tests.test_inference.conftest import BEST

ROOT = Path(__file__).parents[2]
BGR = dict(
    type="DetDataPreprocessor",
    mean=[10.0, 120.0, 200.0],
    std=[30.0, 60.0, 90.0],
    bgr_to_rgb=False,
    pad_size_divisor=32,
    pad_value=1,
)
# Of images on a canvas of 96 x 64: all of it, either side, and hardly anything.
SIZES = [(64, 96), (40, 96), (64, 61), (33, 35)]


def graph_of(checkpoint, *, dataset="park", size=None):
    """A graph of a specialist, as the command makes it."""
    stored = StoredDetector.read(str(checkpoint))
    specialist = take_out(stored, dataset)
    preprocessor = specialist.config.model.data_preprocessor
    canvas = Canvas.of(stored.pipeline, preprocessor, size)
    return DetectorGraph(specialist.build(), canvas).eval()


def canvases(sizes, canvas, *, seed):
    """Blocks of colour on random canvases."""
    rng = np.random.default_rng(seed)
    shape = (len(sizes), 3, canvas.height // 4, canvas.width // 4)
    images = rng.integers(0, 256, shape, dtype=np.uint8).repeat(4, 2).repeat(4, 3)
    return images, np.array(sizes, np.int64)


def upper_half(answers):
    """Their least score: among the last, of equal scores, rounding chooses."""
    return float(np.median(answers.scores[answers.scores > 0]))


def check(graph, detector=None, *, sizes=SIZES):
    """Hold a graph to a detector, on batches that it was not made with."""
    detector = graph.detector if detector is None else detector
    session = start_session(to_onnx(graph, dict(classes=("dog", "person"))))
    seen = []
    for seed, some in enumerate((sizes[:1], sizes[1:], sizes[:2])):
        images, inner = canvases(some, graph.canvas, seed=seed)
        told = answers_of_mmdet(graph, images, inner, detector=detector)
        found = answers_of_graph(session, images, inner)
        for one, other in zip(told, found, strict=True):
            assert one.boxes.shape == other.boxes.shape
            scores, boxes = difference(one, other, least=upper_half(one))
            assert scores < 2e-5
            assert boxes / graph.canvas.width < 1e-4
        seen += found
    apart = [np.abs(one.scores - seen[0].scores).max() for one in seen[1:]]
    assert min(apart) > 2e-4  # nothing of the example images is left
    return session


@pytest.mark.parametrize(
    "base",
    [
        "moe-dino_tiny",
        pytest.param("moe-dino-mini_efficientnet-lite0", marks=pytest.mark.slow),
    ],
)
def test_the_graph_answers_as_mmdet(save, base):
    graph = graph_of(save(base=base))
    session = check(graph)
    # What lies outside of an image makes no difference.
    images, sizes = canvases([(40, 70)], graph.canvas, seed=0)
    before = session.run(None, dict(images=images, sizes=sizes))
    images[:, :, 40:] = 255
    images[:, :, :, 70:] = 7
    after = session.run(None, dict(images=images, sizes=sizes))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_size_and_a_class_alone(save):
    """50 queries and 1 class are 50 answers."""
    graph = graph_of(save(), dataset="sky", size=(60, 100))
    assert (graph.canvas.width, graph.canvas.height) == (64, 128)
    session = check(graph, sizes=[(128, 64), (100, 60), (60, 64), (80, 30)])
    shapes = {one.name: one.shape for one in session.get_outputs()}
    assert shapes == dict(
        boxes=["batch", 50, 4], scores=["batch", 50], labels=["batch", 50]
    )


def test_blue_first_and_what_the_file_says_of_itself(save):
    session = check(graph_of(save(data_preprocessor=BGR)))
    known = session.get_modelmeta().custom_metadata_map
    assert {key: json.loads(value) for key, value in known.items()} == dict(
        image_size=[96, 64],
        keep_ratio=True,
        mean=[200.0, 120.0, 10.0],  # of red, green, blue
        std=[90.0, 60.0, 30.0],
        classes=["dog", "person"],
    )


LOW_RANK = dict(
    experts=dict(type="LowRankExperts", rank=3), shared_expert=dict(type="SharedExpert")
)
KINDS = {
    "whole FFNs": {},
    "low-rank maps": LOW_RANK,
    "affine maps": {**LOW_RANK, "experts": dict(type="AffineExperts")},
    "a norm before": dict(block=dict(norm="pre"), router=dict(type="CosineRouter")),
}


def mixture_graph(checkpoint):
    """The graph of a whole mixture, and the detector that it was made of."""
    stored = StoredDetector.read(str(checkpoint))
    canvas = Canvas.of(stored.pipeline, stored.model["data_preprocessor"])
    detector, votes = voted_detector(stored.build(), stored.path)
    routing = Routing(votes, labels_by_group(stored.space))
    return DetectorGraph(detector, canvas, routing).eval(), stored.build()


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_mixture_answers_as_in_damex(save, kind):
    graph, detector = mixture_graph(save_mixture(save, **KINDS[kind]))
    session = check(graph, detector)
    images, sizes = canvases(SIZES * 4, graph.canvas, seed=9)
    images[4:8] //= 4
    images[8:12, 0] = 255
    images[12:, 1:] = 0
    (shares_BG,) = session.run(["datasets"], dict(images=images, sizes=sizes))
    np.testing.assert_allclose(shares_BG.sum(1), 1.0, atol=1e-5)
    assert len({*shares_BG.argmax(1).tolist()}) > 1
    told = answers_of_mmdet(graph, images, sizes, detector=detector)
    found = answers_of_graph(session, images, sizes)
    for one, other in zip(told, found, strict=True):
        assert max(difference(one, other, least=upper_half(one))) < 1e-2


def test_the_command_writes_a_whole_mixture(save, tmp_path, capsys):
    out, checkpoint = tmp_path / "all.onnx", save_mixture(save)
    capsys.readouterr()
    assert main(["export", str(checkpoint), "--out", str(out)]) == 0
    written, about, compared, _ = capsys.readouterr().out.splitlines()
    assert written.startswith(f"written: {out} (")
    assert about.startswith("3 datasets, 4 classes, ")
    assert compared.startswith("compared with mmdet on noise")
    session = start_session(out.read_bytes())
    names = [one.name for one in session.get_outputs()]
    assert names == ["boxes", "scores", "labels", "datasets"]
    known = session.get_modelmeta().custom_metadata_map
    assert json.loads(known["datasets"]) == ["street", "park", "sky"]
    assert json.loads(known["labels"]) == dict(street=[0, 1], park=[1, 2], sky=[3])


UNWRITTEN = {
    "each token alone": (dict(image_vote=False), "train with moe.image_vote=True"),
    "two experts": (dict(gate=dict(type="TopKGate", k=2)), "a token goes to 2 experts"),
    "dense": (False, "has no experts, or none that were taught"),
    "untaught": (dict(losses=[]), "has no experts, or none that were taught"),
}


@pytest.mark.parametrize(("moe", "words"), UNWRITTEN.values(), ids=UNWRITTEN)
def test_mixtures_that_no_graph_follows(save, tmp_path, capsys, moe, words):
    path = save(moe=False if moe is False else {**BEST, "num_experts": 6, **moe})
    capsys.readouterr()
    assert main(["export", str(path), "--out", str(tmp_path / "all.onnx")]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert words in error


@pytest.mark.parametrize("refine", [False, True])
def test_deformable_detr_without_stages(build_mmdet, refine):
    detector = build_mmdet("MoEDeformableDETR")
    # mmdet's own class, which has no mixture to ask for.
    detector.__class__ = DeformableDETR
    detector.with_box_refine = refine
    generator = torch.Generator().manual_seed(1)
    for branch in detector.bbox_head.cls_branches:
        noise = torch.randn(branch.weight.shape, generator=generator)
        branch.weight.data = noise * 0.4
        branch.bias.data.zero_()
    canvas = Canvas(96, 64, keep_ratio=True, is_rgb=True)
    check(DetectorGraph(detector.eval(), canvas).eval())


def test_boxes_are_those_of_damex_predict(save, photos):
    checkpoint = save()
    graph = graph_of(checkpoint)
    content = to_onnx(graph, {})
    path = photos / "a.png"  # as large as the canvas, so that nothing is resized
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    session = start_session(content)
    (found,) = answers_of_graph(session, *letterbox(image, graph.canvas))
    predictor = Predictor(checkpoint, device="cpu")
    (told,) = predictor(path, dataset="park", min_score=0.0)
    labels = [predictor.datasets["park"].index(name) for name in told.names]
    told = Answers(told.boxes, told.scores, np.array(labels))
    scores, boxes = difference(told, found, least=0.0)
    assert scores < 1e-4
    assert boxes < 1e-2
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        parity = compare(graph, content, image, detector=graph.detector)
        assert torch.get_num_threads() == threads + 1  # one, but for the comparison
    finally:
        torch.set_num_threads(threads)
    assert parity.is_close
    assert parity.detections > 0


@pytest.mark.parametrize(
    ("size", "keep_ratio", "inside"),
    [
        ((192, 64), True, (32, 96)),
        ((20, 40), True, (64, 32)),
        ((48, 32), True, (64, 96)),
        ((20, 40), False, (64, 96)),
    ],
)
def test_images_are_as_large_as_they_fit(size, keep_ratio, inside):
    canvas = Canvas(96, 64, keep_ratio=keep_ratio, is_rgb=True)
    images, sizes = letterbox(Image.new("RGB", size, (1, 2, 3)), canvas)
    assert images.shape == (1, 3, 64, 96)
    assert sizes.tolist() == [[*inside]]
    height, width = inside
    assert (images[0, :, :height, :width] == [[[1]], [[2]], [[3]]]).all()
    assert images.sum() == 6 * height * width


RESIZE = dict(type="Resize", scale=(1333, 800), keep_ratio=True)


@pytest.mark.parametrize(
    ("load", "preprocessor", "is_rgb"),
    [
        ({}, dict(bgr_to_rgb=True), True),
        ({}, {}, False),
        (dict(channel_order="rgb"), {}, True),
        (dict(channel_order="rgb"), dict(rgb_to_bgr=True), False),
    ],
)
def test_a_canvas_is_what_the_evaluation_made(load, preprocessor, is_rgb):
    pipeline = [dict(type="LoadImageFromFile", **load), RESIZE]
    canvas = Canvas.of(pipeline, dict(pad_size_divisor=32, **preprocessor))
    assert canvas == Canvas(1344, 800, True, is_rgb)


def test_evaluations_that_no_canvas_can_follow():
    load = dict(type="LoadImageFromFile")
    with pytest.raises(ConfigError, match="say --image-size WIDTH HEIGHT"):
        Canvas.of([load], {})
    assert Canvas.of([load], {}, (30, 20)) == Canvas(30, 20, True, False)
    stretched = dict(type="Resize", scale=(30, 20))
    assert Canvas.of([load, stretched], {}) == Canvas(30, 20, False, False)
    with pytest.raises(ConfigError, match="does Pad with images, which"):
        Canvas.of([load, RESIZE, dict(type="Pad", size=(800, 800))], {})


def test_differences_are_to_the_nearest_of_the_class():
    """Order says nothing; an answer that only one has is infinitely far."""
    rows = np.array([[0.0, 0, 9, 9], [10, 10, 19, 19], [20, 20, 29, 29]])
    one = Answers(rows, np.array([0.8, 0.8, 0.1]), np.array([0, 0, 1]))
    swapped = Answers(rows[[1, 0, 2]] + 0.25, np.array([0.8, 0.75, 0.1]), one.labels)
    assert difference(one, swapped, least=0.5) == pytest.approx((0.05, 0.25))
    other = Answers(rows, one.scores, np.array([0, 0, 2]))
    assert difference(one, other, least=0.5) == (0.0, 0.0)
    assert difference(one, other, least=0.0) == (np.inf, np.inf)


def export(checkpoint, out, *more, dataset="park"):
    words = ("export", checkpoint, "--dataset", dataset, "--out", out, *more)
    return main([str(word) for word in words])


def test_the_command_says_what_it_compared(save, tmp_path, capsys):
    out = tmp_path / "new" / "park.onnx"
    checkpoint = save()
    capsys.readouterr()  # what building a detector says
    assert export(checkpoint, out) == 0
    said = capsys.readouterr()
    written, about, compared, times = said.out.splitlines()
    size = out.stat().st_size / 1e6
    expected = f"written: {out} ({size:.1f} MB), for images of 96 x 64 pixels"
    assert written == expected
    assert about.startswith("park: 2 classes, ")
    assert compared.startswith("compared with mmdet on noise (no validation image is")
    assert re.search(r": [\d.]+ in onnxruntime, [\d.]+ in mmdet$", times)
    known = start_session(out.read_bytes()).get_modelmeta().custom_metadata_map
    assert json.loads(known["classes"]) == ["person", "dog"]
    assert json.loads(known["dataset"]) == "park"


def test_a_graph_that_answers_otherwise_is_not_written(
    save, tmp_path, capsys, monkeypatch
):
    checkpoint, out = save(), tmp_path / "park.onnx"
    best = DetectorGraph._best

    def moved(*arguments):
        boxes, scores, labels = best(*arguments)
        return boxes + 0.2, scores, labels

    monkeypatch.setattr(DetectorGraph, "_best", moved)
    assert export(checkpoint, out) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "was not written: on noise" in error
    assert "boxes by 2.0e-01 pixels; allowed are 0.001 and 0.1" in error
    assert not out.exists()


def test_an_operation_that_onnx_has_not(save, tmp_path, capsys, monkeypatch):
    checkpoint, out = save(), tmp_path / "park.onnx"
    tokens = onnx_graph._tokens
    monkeypatch.setattr(
        onnx_graph, "_tokens", lambda one: torch.special.i1(tokens(one))
    )
    capsys.readouterr()
    assert export(checkpoint, out) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written as ONNX (opset 17)" in error
    assert "special_i1" in error
    assert not out.exists()


def test_missing_packages_are_named_first(tmp_path, capsys, monkeypatch):
    found = {"onnx": object(), "onnxruntime": None}
    monkeypatch.setattr(onnx_graph, "find_spec", found.get)
    assert export(tmp_path / "none.pth", tmp_path / "park.onnx") == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error == (
        "error: a .onnx file needs onnxruntime; pip install 'damex[onnx]'."
    )


def test_targets_that_cannot_be(tmp_path, capsys):
    there = tmp_path / "park.onnx"
    there.write_text("mine")
    checkpoint = tmp_path / "none.pth"
    targets = {
        there: "park.onnx exists; remove it",
        tmp_path / "park.pt": "--out must end in .pth or .onnx, got",
    }
    for out, words in targets.items():
        assert export(checkpoint, out) == 2
        assert words in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert export(checkpoint, tmp_path / "park.pth", "--image-size", 96, 64) == 2
    assert "a .pth takes images of any size" in capsys.readouterr().err
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "all.pth")]) == 2
    assert "add --dataset NAME" in capsys.readouterr().err


def test_detectors_that_no_graph_follows(build_mmdet, save):
    canvas = Canvas(96, 64, keep_ratio=True, is_rgb=True)
    with pytest.raises(ConfigError, match="is a MoEDETR; as ONNX DINO and Deform"):
        DetectorGraph(build_mmdet("MoEDETR"), canvas)
    graph = graph_of(save())
    graph.detector.bbox_head.loss_cls.use_sigmoid = False
    with pytest.raises(ConfigError, match="exclude each other"):
        DetectorGraph(graph.detector, canvas)


ALONE = """
import sys

class Alone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("damex", "mmcv", "mmdet", "mmengine", "torch"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Alone())
"""


@pytest.mark.slow
def test_the_code_of_the_docs_runs_without_torch(save, photos, tmp_path):
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]*onnxruntime[^`]*)```", page)
    assert export(save(), tmp_path / "playroom.onnx") == 0
    with Image.open(photos / "b.jpg") as image:
        image.save(tmp_path / "room.jpg")
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code.replace(">= 0.3", ">= 0.0")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 100
    assert {line.split()[0] for line in lines} == {"dog", "person"}
