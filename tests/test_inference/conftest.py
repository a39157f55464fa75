"""Checkpoints as a training writes them, of small real detectors without training."""

import copy

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from damex.datasets.label_space import LabelSpace
from damex.inference.predictor import Prediction, Predictor

SPACE = LabelSpace(
    classes=("car", "person", "dog", "kite"),
    dataset_names=("street", "park", "sky"),
    dataset_classes=(
        {"car": "car", "person": "person"},
        {"dog": "dog", "walker": "person"},
        {"kite": "kite"},
    ),
    groups=("street", "park", "sky"),
)
PIPELINE = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(96, 64), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]
BEST = dict(
    layers=dict(encoder="all", decoder="all"),
    gate=dict(type="TopKGate", k=1, renormalize=True),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    image_vote=True,
)


CONTENTS, PREDICTORS = {}, {}  # by their arguments: building takes a second


def spread_scores(detector):
    """Draw classifiers with scores far apart; returns the generator."""
    generator = torch.Generator().manual_seed(1)
    for branch in detector.bbox_head.cls_branches:
        noise = torch.randn(branch.weight.shape, generator=generator)
        branch.weight.data = noise * 0.4
        branch.bias.data.zero_()
    return generator


@pytest.fixture
def save(tmp_path, model_config, build):
    """Save a detector with scores far apart; ``moe=False`` makes a dense one."""

    def make_content(space, moe, changes):
        groups = len(space.group_names)
        made = dict(moe=moe, num_groups=groups, divisor=32, **changes)
        detector = build(**copy.deepcopy(made))
        generator = spread_scores(detector)
        for key, value in detector.named_parameters():
            if "router" in key:
                value.data *= 30.0  # a router that has an opinion
            if "up_ELD" in key:  # zero before a training
                value.data = torch.randn(value.shape, generator=generator)
        config = Config(
            dict(
                model=model_config(**made),
                test_dataloader=dict(dataset=dict(pipeline=PIPELINE)),
            )
        )
        meta = dict(cfg=config.pretty_text, dataset_meta=space.to_metainfo())
        return dict(meta=meta, state_dict=detector.state_dict())

    def make(name="made.pth", *, space=SPACE, moe=None, drop_meta=(), **changes):
        moe = (copy.deepcopy(BEST) if moe is None else moe) or None
        key = repr((space, moe, changes))
        if key not in CONTENTS:
            CONTENTS[key] = make_content(space, moe, changes)
        meta, state = CONTENTS[key].values()
        meta = {key: value for key, value in meta.items() if key not in drop_meta}
        path = tmp_path / name
        torch.save(dict(meta=meta, state_dict=state), path)
        return path

    return make


class InTorch:
    """Runs a graph as a session of onnxruntime does, without exporting it."""

    def __init__(self, graph):
        self.graph = graph

    @torch.no_grad()
    def run(self, names, inputs):
        outputs = self.graph(torch.from_numpy(inputs["images"].copy()))
        named = dict(zip(self.graph.outputs, outputs, strict=True))
        return [named[name].numpy() for name in names]


@pytest.fixture
def exports_nothing(monkeypatch):
    """``damex export`` writes an empty ONNX file, and compares the graph in torch."""
    graphs, module = [], "damex.workbench.export.export"
    monkeypatch.setattr(
        f"{module}.to_onnx", lambda graph, _: graphs.append(graph) or b""
    )
    monkeypatch.setattr(f"{module}.start_session", lambda _: InTorch(graphs[-1]))


@pytest.fixture
def predictor(save):
    """Of the default detector; tests do not change it."""
    if "default" not in PREDICTORS:
        PREDICTORS["default"] = Predictor(save(), device="cpu")
    return PREDICTORS["default"]


@pytest.fixture
def photos(tmp_path):
    """A folder of three images of different sizes."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = {"a.png": (64, 96), "b.jpg": (60, 40), "deep/a.png": (32, 90)}
    for name, (height, width) in names.items():
        pixels = rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / name)
    return folder


@pytest.fixture
def make_prediction():
    """Of an image of 96 x 64 pixels with a dog and a car."""

    def make(path=None, *, probabilities=None, dataset="park", frame=None, image=None):
        return Prediction(
            path=path,
            width=96,
            height=64,
            boxes=np.array([[8, 10, 28, 40], [1, 2, 3.5, 4]], np.float32),
            scores=np.array([0.9, 0.25], np.float32),
            labels=np.array([1, 0]),
            names=("dog", "car"),
            dataset=dataset,
            probabilities={} if probabilities is None else probabilities,
            frame=frame,
            image=np.full((64, 96, 3), 255, np.uint8) if image is None else image,
        )

    return make


@pytest.fixture
def clip(tmp_path):
    """A video of five grey frames of 96 x 64 pixels, each lighter than the last."""
    path = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 12.5, (96, 64))
    for grey in range(20, 220, 40):
        writer.write(np.full((64, 96, 3), grey, np.uint8))
    writer.release()
    return path
