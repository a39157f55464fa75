"""Detectors of Transformers, written for Transformers alone and as ONNX graphs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from safetensors.torch import load_file

from damex.__main__ import main
from damex.datasets.label_space import LabelSpace
from damex.errors import ConfigError
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint

pytest.importorskip("transformers", reason="needs the extra hf")

import transformers

from damex.hf.adapters import MoEAdapter
from damex.hf.families import load_from_transformers
from damex.hf.folder import image_processor
from damex.inference.media import Inputs
from damex.workbench.export.export import detections_of_graph
from damex.workbench.export.plain_transformers import TransformersGraph, extract_plain
from tests.test_hf.conftest import BACKBONES, PREPROCESSOR
from tests.test_inference.test_export import (
    InTorch,
    check,
    export,
    mixture_graph,
    pictures,
)

PAGE = Path(__file__).parents[2] / "docs/guides/transformers.md"
CODES = re.findall(r"```python\n(import [^`]*)```", PAGE.read_text("utf-8"))
SPACE = LabelSpace(
    classes=("car", "person", "dog", "kite"),
    dataset_names=("street", "park"),
    dataset_classes=(
        {"car": "car", "person": "person"},
        {"walker": "person", "dog": "dog", "kite": "kite"},
    ),
    groups=("street", "park"),
)
LOAD, PACK = dict(type="LoadImageFromFile"), dict(type="PackDetInputs")
RESIZE = dict(type="Resize", scale=(64, 64), keep_ratio=True)
PAD = dict(type="Pad", size=(64, 64))


@pytest.fixture(params=BACKBONES)
def family(request):
    """Every family with a backbone of its own, one after the other."""
    return request.param


@pytest.fixture
def save(tmp_path, build_hf, model_of):
    """Save a detector whose experts, scores and boxes are far apart."""

    def make(family, *, steps=(RESIZE, PAD), **options):
        detector = build_hf(family, moving=True, **options)
        generator = torch.Generator().manual_seed(1)
        for name, value in detector.named_parameters():
            if "norm" in name or value.dim() == 1:
                continue
            noise = torch.randn(value.shape, generator=generator)
            scale = 0.4 if "class_embed" in name or "score_head" in name else 0.1
            value.data += noise * scale
        for module in detector.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.ones_(module.weight)  # Transformers' are near zero
        config = Config(
            dict(
                model=model_of(family, **options),
                test_dataloader=dict(dataset=dict(pipeline=[LOAD, *steps, PACK])),
            )
        )
        meta = dict(cfg=config.pretty_text, dataset_meta=SPACE.to_metainfo())
        path = tmp_path / f"{family}.pth"
        torch.save(dict(meta=meta, state_dict=detector.state_dict()), path)
        return path

    return make


def plain_of(checkpoint, dataset="park"):
    return extract_plain(DetectorCheckpoint.read(str(checkpoint)), dataset)


def load(folder):
    """Model and image processor, as a user of Transformers loads them."""
    model, info = transformers.AutoModelForObjectDetection.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values())
    return model, transformers.AutoImageProcessor.from_pretrained(folder)


def detections(model, processor, image, **options):
    """What Transformers finds in an RGB image that is 64 pixels high or wide."""
    inputs = processor(images=image, return_tensors="pt", **options)
    with torch.no_grad():
        outputs = model(inputs["pixel_values"])
    (found,) = processor.post_process_object_detection(
        outputs, threshold=0.0, target_sizes=[(64, 64)]
    )
    best = {key: value[:10].numpy() for key, value in found.items()}
    best["boxes"], inside = ended(best["boxes"], *image.shape[1::-1])
    return outputs, {key: value[inside] for key, value in best.items()}


def ended(boxes, width, height):
    """Boxes that end at the image, as those of damex, and which have an area."""
    boxes = np.clip(boxes, 0, [width, height, width, height])
    return boxes, (boxes[:, 2:] > boxes[:, :2]).all(1)


def assert_same(found, known):
    np.testing.assert_allclose(found["scores"], known.scores, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["boxes"], known.boxes, rtol=0, atol=64 * 1e-5)


def best(**changes):
    """damex_best with other parts."""
    moe = Config.fromfile(PAGE.parents[2] / "configs/_base_/moe/damex_best.py").moe
    return {**moe, **changes}


TWICE = dict(type="TopKGate", k=1, renormalize=True, weight_scale=2.0)
MOES = {
    "best": {},
    "some layers, weights of 2": dict(
        moe=best(layers=dict(decoder=[1], encoder="all"), gate=TWICE)
    ),
    "no experts": dict(moe=None, num_groups=None),
}


@pytest.mark.parametrize("options", MOES.values(), ids=MOES)
def test_a_folder_equals_the_mixture_that_is_told(save, family, tmp_path, options):
    checkpoint = save(family, **options)
    plain_of(checkpoint).write(tmp_path / "park")
    model, processor = load(tmp_path / "park")
    assert model.config.id2label == {0: "person", 1: "dog", 2: "kite"}
    predictor = Predictor(checkpoint, device="cpu")
    for seed, size in enumerate([(64, 40), (32, 64)]):
        (image,) = pictures(size, 1, seed=seed)
        (told,) = predictor(image, dataset="park", min_score=0.0)
        outputs, found = detections(model, processor, image)
        assert [model.config.id2label[n] for n in found["labels"].tolist()] == [
            *told.names
        ]
        assert_same(found, told)
    # Experts make a difference, so that leaving them out would be seen.
    if options.get("moe", 1) is not None:
        for layer in model.model.decoder.layers:
            last = [m for m in layer.mlp.modules() if isinstance(m, torch.nn.Linear)][
                -1
            ]
            hidden = 32 if family == "deimv2" else 64
            assert last.in_features > hidden
            last.weight.data[:, hidden:] = 0.0
        other, _ = detections(model, processor, image)
        assert (other.logits - outputs.logits).abs().max() > 1e-2


@pytest.fixture
def attach():
    """The function of the page, which knows neither damex nor its checkpoint."""
    known = {}
    exec(CODES[2], known)
    return known["attach"]


@pytest.fixture
def save_voting(save):
    """Save a detector and two images, which its first router takes for street and park.

    Other routers are undecided: without the votes before they may choose otherwise.
    """

    def make(family, **options):
        checkpoint = save(family, **options)
        images = [pictures((64, 40), 1, seed=seed)[0] for seed in (0, 1)]
        images[1] = images[1] // 3
        predictor, seen = Predictor(checkpoint, device="cpu"), []
        modules = predictor._detector.named_modules()
        name, first = next(m for m in modules if isinstance(m[1], MoEAdapter))
        first.register_forward_pre_hook(lambda _, x: seen.append(x[0].mean((0, 1))))
        for image in images:
            predictor(image)
        middle, apart = (seen[0] + seen[1]) / 2, seen[0] - seen[1]
        apart = apart - (apart @ middle) / (middle @ middle) * middle
        row = 20 * apart / (apart @ apart)  # logits of 10 and -10
        content = torch.load(checkpoint, weights_only=False)
        key = f"{name}.moe.router.weight_ED"
        content["state_dict"][key] = torch.stack([row, -row])
        torch.save(content, checkpoint)
        return checkpoint, images

    return make


def test_files_of_adapters_equal_the_mixture(save_voting, family, tmp_path, attach):
    """By the code of the page: of each dataset, and of what an image votes for."""
    checkpoint, images = save_voting(family)
    folder = tmp_path / "all"
    assert export(checkpoint, f"{folder}/", dataset=None) == 0
    predictor, apart = Predictor(checkpoint, device="cpu"), []
    for dataset in (None, "street", "park"):
        model, processor = load(folder)
        assert [*model.config.id2label.values()] == [*SPACE.classes]
        plain = [detections(model, processor, image)[0].logits for image in images]
        attach(model, folder, dataset)
        told = predictor(images, dataset=dataset or "auto", min_score=0.0)
        names = [dataset] * 2 if dataset else ["street", "park"]
        assert [one.dataset for one in told] == names
        for image, before, known in zip(images, plain, told, strict=True):
            outputs, found = detections(model, processor, image)
            names = [model.config.id2label[n] for n in found["labels"].tolist()]
            assert names == [*known.names]
            assert_same(found, known)
            seen = outputs.logits.isfinite()
            apart.append((outputs.logits - before)[seen].abs().max())
    assert min(apart) > 1e-2  # the shared part alone is another detector


def test_files_of_adapters_say_what_they_hold(save, tmp_path):
    """A weight of 2 is in the tensors; layers without experts have none."""
    moe = best(layers=dict(decoder=[1], encoder=[]), gate=TWICE)
    checkpoint, folder = save("d_fine", moe=moe), tmp_path / "all"
    assert export(checkpoint, f"{folder}/", dataset=None) == 0
    files = ["adapters.json", "adapters.safetensors", "config.json"]
    files += ["model.safetensors", "preprocessor_config.json"]
    assert sorted(one.name for one in folder.iterdir()) == files
    about = json.loads((folder / "adapters.json").read_text("utf-8"))
    name = "model.decoder.layers.1.mlp"
    (layer,) = about["layers"]
    assert layer == dict(name=name, kind="low-rank", rank=2, router="linear", windows=1)
    assert about["groups"] == [
        dict(name="street", labels=[0, 1]),
        dict(name="park", labels=[1, 2, 3]),
    ]
    assert about["datasets"]["park"] == dict(group=1, labels=[1, 2, 3])
    heads = [f"model.decoder.class_embed.{n}" for n in range(2)]
    assert about["class_heads"] == [*heads, "model.enc_score_head"]
    tensors = load_file(folder / "adapters.safetensors")
    shapes = {"router.weight": (2, 32)}
    for dataset in ("street", "park"):
        shapes |= {f"{dataset}.lora_A.weight": (2, 32)}
        shapes |= {f"{dataset}.lora_B.weight": (32, 2)}
    found = {key: tuple(one.shape) for key, one in tensors.items()}
    assert found == {f"{name}.{key}": shape for key, shape in shapes.items()}
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    up_ELD = state["detr.model.decoder.layers.1.adapter.moe.experts.up_ELD"]
    up_DL = tensors[f"{name}.park.lora_B.weight"]
    torch.testing.assert_close(up_DL, 2 * up_ELD[1].T)


def test_a_mixture_without_experts_is_a_folder_of_all_classes(save, tmp_path):
    checkpoint, folder = save("d_fine", moe=None, num_groups=None), tmp_path / "all"
    assert export(checkpoint, f"{folder}/", dataset=None) == 0
    assert not (folder / "adapters.json").exists()
    model, processor = load(folder)
    (image,) = pictures((64, 40), 1, seed=1)
    (told,) = Predictor(checkpoint, device="cpu")(image, dataset="all", min_score=0.0)
    _, found = detections(model, processor, image)
    assert [model.config.id2label[n] for n in found["labels"].tolist()] == [*told.names]
    assert_same(found, told)


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        (dict(image_vote=False), "every token chooses its expert, which no file"),
        (dict(losses=[]), "none that were trained to predict the dataset"),
        (dict(num_experts=3), "the dataset has 2 experts"),
        (dict(router=dict(type="MLPRouter")), "and a MLPRouter; files of adapters"),
    ],
)
def test_experts_that_no_files_of_adapters_hold(save, tmp_path, capsys, moe, words):
    folder = tmp_path / "all"
    assert export(save("d_fine", moe=best(**moe)), f"{folder}/", dataset=None) == 2
    assert words in capsys.readouterr().err
    assert not folder.exists()


def test_a_folder_is_loaded_by_damex_again(save, tmp_path):
    plain = plain_of(save("deimv2"), "street")
    plain.write(tmp_path / "street")
    content = load_from_transformers(f"hf://{tmp_path / 'street'}")
    assert content["meta"]["dataset_meta"]["classes"] == ("car", "person")
    assert content["state_dict"].keys() == plain.state.keys()
    for key, value in content["state_dict"].items():
        assert torch.equal(value, plain.state[key]), key


IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])


@pytest.mark.parametrize(
    ("steps", "size", "canvas"),
    [
        ((RESIZE, PAD), (64, 64), (64, 64)),
        ((RESIZE, dict(type="Pad", pad_to_square=True)), (64, 64), (64, 64)),
        ((RESIZE, PAD), (80, 80), (96, 96)),  # whole strides
        ((dict(type="Resize", scale=(96, 64)),), (96, 64), (64, 96)),
        ((dict(type="Resize", scale=(64, 64)), IMAGENET), (64, 64), (64, 64)),
    ],
    ids=["canvas", "square", "strides", "stretched", "normalized"],
)
def test_the_image_processor_shows_what_the_pipeline_shows(
    save, tmp_path, steps, size, canvas
):
    """Twice the size: antialiasing has no effect. Rounding of sides has one."""
    options = (
        dict(data_preprocessor=PREPROCESSOR | IMAGENET) if IMAGENET in steps else {}
    )
    steps = [step for step in steps if step is not IMAGENET]
    stored = DetectorCheckpoint.read(str(save("rt_detr_v2", steps=steps, **options)))
    plain = extract_plain(stored.resized(size), "park")
    detector, (image,) = plain.build(), pictures((size[0] // 2, 20), 1, seed=0)
    (inputs,) = image_processor(detector, plain.pipeline)(
        images=image, return_tensors="pt"
    ).pixel_values
    assert inputs.shape[1:] == canvas
    packed = Inputs(plain.pipeline)(image)
    data = {key: [packed[key]] for key in ("inputs", "data_samples")}
    (expected,) = detector.data_preprocessor(data)["inputs"]
    assert (inputs - expected).abs().max() < 1.5 / detector.data_preprocessor.std.min()


REFUSED = {
    "soft": (dict(moe=best(gate=dict(type="TopKGate", k=1))), "renormalize=False"),
    "tanh": (dict(config=dict(encoder_activation_function="tanh")), "FFNs have tanh"),
    "sizes": (dict(steps=(RESIZE, dict(type="Pad", size_divisor=32))), "in one size"),
    "steps": (dict(steps=(dict(type="RandomFlip"), RESIZE)), "applies LoadImageFrom"),
    "mean": (
        dict(data_preprocessor=dict(PREPROCESSOR, mean=[9.0] * 3)),
        "export a .onnx file, which prepares images itself",
    ),
    "channels": (
        dict(data_preprocessor=dict(PREPROCESSOR, bgr_to_rgb=False)),
        r"scales pixels to \[0, 1\] and pads with black",
    ),
    "portraits": (
        dict(steps=({**RESIZE, "scale": (96, 64)}, dict(type="Pad", size=(96, 96)))),
        "shows images otherwise",
    ),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_plain_equal_is_refused(save, tmp_path, capsys, options, words):
    checkpoint = save("rt_detr_v2", **options)
    assert export(checkpoint, tmp_path / "park") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(words, error)
    assert not (tmp_path / "park").exists()


@pytest.mark.parametrize("dataset", ["park", None])
def test_what_no_folder_holds_is_refused(save, tmp_path, capsys, dataset):
    assert export(save("d_fine timm"), tmp_path / "park", dataset=dataset) == 2
    assert re.search("cannot read .* a .onnx file", capsys.readouterr().err)
    assert not (tmp_path / "park").exists()


def test_the_command_writes_a_folder(save, tmp_path, capsys):
    checkpoint, out = save("rt_detr_v2"), tmp_path / "park.v2"
    out.mkdir()
    capsys.readouterr()
    assert export(checkpoint, f"{out}/", "--image-size", 96, 96) == 0
    written, about = capsys.readouterr().out.splitlines()
    assert written == f"written: {out}"
    assert about.startswith("park: 3 classes, 0.")
    assert about.endswith("; for Transformers, without damex")
    files = {"config.json", "model.safetensors", "preprocessor_config.json"}
    assert {one.name for one in out.iterdir()} == files
    assert load(out)[1].pad_size == dict(height=96, width=96)
    assert export(checkpoint, f"{out}/") == 2
    assert f"{out} exists; remove it" in capsys.readouterr().err


def test_a_card_names_the_family_and_its_backbone(save, tmp_path):
    out = tmp_path / "card"
    assert main(["card", str(save("d_fine")), "--out", str(out)]) == 0
    about = "- detector: MoETransformersDetector d\\_fine\n- backbone: hgnet\\_v2\n"
    assert about in (out / "README.md").read_text()


def test_forms_that_do_not_fit_are_refused(save, tmp_path, capsys):
    checkpoint = save("rt_detr_v2")
    for out, options, words in [
        (
            "park.pth",
            {},
            r"is of Transformers, which .*park.pth is not for; name --out",
        ),
        ("all.pth", dict(dataset=None), "a .pth file is of one dataset: add --dataset"),
    ]:
        assert export(checkpoint, tmp_path / out, **options) == 2
        assert re.search(words, capsys.readouterr().err)
    content = torch.load(checkpoint, weights_only=False)
    text = Config.fromstring(content["meta"]["cfg"], ".py")
    text.model = dict(type="MoEDINO")
    content["meta"]["cfg"] = text.pretty_text
    torch.save(content, checkpoint)
    assert export(checkpoint, tmp_path / "park") == 2
    assert re.search("is of mmdet, which .*park is not", capsys.readouterr().err)


STRETCHED = dict(type="Resize", scale=(90, 64))


@pytest.mark.parametrize("family", [*BACKBONES, "d_fine timm"])
@pytest.mark.parametrize(
    ("dataset", "steps", "exported"),
    [
        *[(one, (RESIZE, PAD), False) for one in ("park", None)],
        *[(one, (STRETCHED,), False) for one in ("park", None)],  # 64 x 90 of 64 x 96
        # An export takes half a minute: of all datasets, or of one.
        pytest.param(None, (RESIZE, PAD), True, marks=pytest.mark.slow),
    ],
)
def test_a_graph_detects_what_the_detector_does(
    save_voting, family, dataset, steps, exported
):
    """In batches of several sizes, none of which the graph was made with."""
    if family == "rf_detr" and steps == (STRETCHED,):
        steps = (dict(type="Resize", scale=(60, 60)),)  # 60 x 60 pixels of 64 x 64
    checkpoint, images = save_voting(family, steps=steps)
    if exported and family.startswith(("deform", "d_fine timm", "deimv2", "rf_detr")):
        dataset = "park"
    if dataset is None and family.startswith("deformable_detr"):
        with pytest.raises(ConfigError, match="found other detections"):
            mixture_graph(checkpoint, TransformersGraph)
        return
    if dataset is None:
        graph, detector = mixture_graph(checkpoint, TransformersGraph)
    else:
        plain = plain_of(checkpoint)
        graph, detector = (
            TransformersGraph(plain.build(), plain.pipeline),
            plain.build(),
        )
    session = check(
        graph.eval(), detector, session=None if exported else InTorch(graph)
    )
    if dataset is None:
        found = detections_of_graph(session, np.stack(images))
        street, park = ({*one.labels[one.scores > 0].tolist()} for one in found)
        assert street <= {0, 1}
        assert park <= {1, 2, 3}


@pytest.mark.slow
def test_the_code_of_the_page_runs_without_damex(save, tmp_path, run_alone):
    """On an image that lies on its side and is not resized, and on a larger one."""
    first, second = (c.replace("256", "64").replace("0.3", "0.0") for c in CODES[:2])
    checkpoint = save("d_fine")
    plain_of(checkpoint).write(tmp_path / "playroom")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    rooms = tmp_path / "room.jpg", tmp_path / "large.png"
    Image.fromarray(pictures((64, 40), 1, seed=3)[0]).save(rooms[0], exif=exif)
    Image.fromarray(pictures((210, 90), 1, seed=4)[0]).save(rooms[1])
    detect = first[first.index("with torch.no_grad") :]
    again = "print(10 * '-')\nimage = Image.open('large.png')\n"
    prepare = first[first.index("inputs = ") : first.index("with torch.no_grad")]
    code = first + again + prepare + second + detect
    printed = run_alone(code, tmp_path).split(10 * "-")
    predictor = Predictor(checkpoint, device="cpu")
    for room, text in zip(rooms, printed, strict=True):
        (told,) = predictor(room, dataset="park", min_score=0.0)
        lines = [line for line in text.splitlines() if "[" in line][:10]
        rows = [line.split(maxsplit=2) for line in lines]
        found = np.array([json.loads(box) for _, _, box in rows])
        boxes, inside = ended(found, told.width, told.height)
        rows = [row for row, kept in zip(rows, inside, strict=True) if kept]
        assert [name for name, _, _ in rows] == [*told.names]
        scores = [float(score) for _, score, _ in rows]
        assert scores == pytest.approx(told.scores, abs=1e-5)
        np.testing.assert_allclose(boxes[inside], told.boxes, atol=1e-2)
