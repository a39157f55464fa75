"""One image has one geometry: in training, evaluation, prediction and exports."""

import copy

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from PIL import Image

from damex.config_files import config_of
from damex.datasets.geometry import (
    check_views,
    image_size_of,
    padding_notes,
    pipelines_of,
    set_image_size,
    view_of,
)
from damex.engine.config import build_runner
from damex.errors import ConfigError
from damex.inference.media import Inputs
from damex.inference.stored import ANNOTATION_STEPS
from damex.models.queries import batches_of_one_shape, image_mask_of
from damex.workbench.check.sources import mixture_config_of
from tests.conftest import MMDET_CONFIGS
from tests.test_configs import COMPLETE

LOAD, LABELS = dict(type="LoadImageFromFile"), dict(type="LoadAnnotations")
FLIP, PACK = dict(type="RandomFlip", prob=0.5), dict(type="PackDetInputs")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")


def resize(*scale, **options):
    return dict(type="Resize", scale=scale, keep_ratio=True, **options)


def config(train, test, **keys):
    """A config whose datasets have these steps between loading and packing."""
    loaders = {
        loader: dict(
            dataset=dict(type="CocoDataset", pipeline=[LOAD, LABELS, *steps, PACK])
        )
        for loader, steps in zip(LOADERS, (train, test, test), strict=True)
    }
    return Config(copy.deepcopy(dict(**loaders, **keys)))


def steps_of(cfg, loader):
    (steps,) = pipelines_of(cfg, loader).values()
    return [dict(step) for step in steps[2:-1]]


# --- image_size -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [512, (512, 384), [512, 384]])
def test_one_key_sets_the_size_of_all_pipelines(size):
    pair = (512, 512) if size == 512 else (512, 384)
    cfg = config(
        [resize(256, 256), FLIP, dict(type="Pad", size=(256, 256))],
        [resize(256, 256)],
        image_size=size,
        model=dict(data_preprocessor=dict(pad_size_divisor=256)),
    )
    (note,) = set_image_size(cfg)
    assert f"256 x 256, becomes {pair[0]} x {pair[1]}, and all other" in note
    for _ in range(2):  # from now on, all is as it should be
        assert set_image_size(cfg) == []
        train = [resize(*pair), FLIP, dict(type="Pad", size=(512, 512))]
        assert steps_of(cfg, "train_dataloader") == train
        assert steps_of(cfg, "val_dataloader") == [resize(*pair)]
        assert steps_of(cfg, "test_dataloader") == [resize(*pair)]
        assert cfg.model.data_preprocessor.pad_size_divisor == 512
        assert image_size_of(cfg) == pair


def test_random_sizes_change_in_proportion():
    """The longer side from 1333 to 400, the shorter one from 800 to 240: by 0.3."""
    scales = [(480, 1333), (800, 1333), (400, 4200)]
    train = [
        dict(type="RandomChoiceResize", scales=scales, keep_ratio=True),
        dict(type="RandomCrop", crop_size=(384, 600), crop_type="absolute_range"),
        dict(type="RandomCrop", crop_size=(0.5, 1.0), crop_type="relative"),
        dict(type="RandomChoice", transforms=[[resize(800, 1333)], [FLIP]]),
        dict(type="Pad", size=None, size_divisor=32),
        dict(type="CachedMosaic", img_scale=(640, 640), pad_val=114.0),
        dict(type="ResizeShortestEdge", scale=800, max_size=1333),
    ]
    cfg = config(
        train,
        [resize(1333, 800)],
        image_size=(400, 240),
        model=dict(data_preprocessor=dict(pad_size_divisor=32)),
    )
    set_image_size(cfg)
    choice, crop, share, nested, pad, mosaic, shortest = steps_of(
        cfg, "train_dataloader"
    )
    assert choice["scales"] == [(144, 400), (240, 400), (120, 1260)]
    assert crop["crop_size"] == (115, 180)
    assert share["crop_size"] == (0.5, 1.0)
    assert nested["transforms"] == [[resize(240, 400)], [FLIP]]
    assert pad == dict(type="Pad", size=None, size_divisor=32)
    assert (mosaic["img_scale"], mosaic["pad_val"]) == ((192, 192), 114.0)
    assert (shortest["scale"], shortest["max_size"]) == (240, 400)
    assert steps_of(cfg, "val_dataloader") == [resize(400, 240)]
    assert cfg.model.data_preprocessor.pad_size_divisor == 32  # no canvas


def test_a_dataset_with_its_own_pipeline_follows(two_datasets):
    first, second = two_datasets
    own = [LOAD, LABELS, resize(64, 64), PACK]
    first["train"] = dict(
        type="CocoDataset", ann_file=first["train"], pipeline=copy.deepcopy(own)
    )
    loader = dict(dataset=dict(type="MixtureDataset", pipeline=own))
    cfg = Config(
        dict(
            mixture=[first, second],
            image_size=32,
            **{name: copy.deepcopy(loader) for name in LOADERS},
        )
    )
    set_image_size(cfg)
    steps = [LOAD, LABELS, resize(32, 32), PACK]
    assert pipelines_of(cfg, "train_dataloader") == dict(street=steps, park=steps)


@pytest.mark.parametrize(
    ("size", "train", "test", "words"),
    [
        ("big", [], [resize(9, 9)], "image_size must be .* got 'big'"),
        (0, [], [resize(9, 9)], "image_size must be"),
        ((1, 2, 3), [], [resize(9, 9)], "image_size must be"),
        (True, [], [resize(9, 9)], "image_size must be"),
        (64, [resize(9, 9)], [], r"no Resize\(scale=\(width, height\)\)"),
        # mmdet's own large-scale jitter: training follows the variable already.
        (
            (1024, 1024),
            [dict(type="Pad", size=(1024, 1024))],
            [resize(1333, 800)],
            "so is size of Pad, but evaluation resizes to 1333 x 800",
        ),
    ],
)
def test_sizes_that_cannot_be(size, train, test, words):
    with pytest.raises(ConfigError, match=words):
        set_image_size(config(train, test, image_size=size))


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_shipped_configs_take_another_size(path):
    """From the command line of a training, and of data check and browse."""
    for read in (config_of, mixture_config_of):
        cfg = read(str(path), ["image_size=(96,64)"])
        set_image_size(cfg)
        assert image_size_of(cfg) == (96, 64)
        assert check_views(cfg) == padding_notes(cfg) == []
    divisor = cfg.model.data_preprocessor.get("pad_size_divisor")
    assert divisor in (1, 32, 96)


# --- The same view --------------------------------------------------------------------

JITTER = dict(type="PhotoMetricDistortion")
SCALES = dict(type="RandomChoiceResize", scales=[(32, 90), (48, 90)], keep_ratio=True)
ALIKE = {
    "flip": ([resize(64, 64), FLIP], [resize(64, 64)]),
    "order of flip": ([FLIP, JITTER, resize(64, 64)], [resize(64, 64)]),
    "written otherwise": ([resize(64, 64)], [dict(resize(64, 64), scale=64)]),
    "random sizes": ([FLIP, SCALES], [resize(90, 60)]),
    "crops of the same scale": (
        [resize(64, 64), dict(type="RandomCrop", crop_size=(20, 24))],
        [resize(64, 64)],
    ),
    "a border in both": (
        [resize(64, 64), dict(type="Pad", size=(64, 64)), FLIP],
        [resize(64, 64), dict(type="Pad", size=(64, 64))],
    ),
    "filters": (
        [dict(type="FilterAnnotations", min_gt_bbox_wh=(1, 1)), resize(64, 64)],
        [resize(64, 64)],
    ),
}


@pytest.mark.parametrize(("train", "test"), ALIKE.values(), ids=ALIKE)
def test_random_steps_are_for_training_alone(train, test):
    assert check_views(config(train, test)) == []


PAD = dict(type="Pad", size=(64, 64))
UNLIKE = {
    "a border": (
        ([resize(64, 64), PAD], [resize(64, 64)]),
        r"training applies Pad\(size=\(64, 64\)\), so that it has 64 x 64 px, "
        r"evaluation nothing",
    ),
    "a border after random sizes": (
        ([SCALES, dict(type="Pad", size_divisor=32)], [resize(90, 60)]),
        r"training applies Pad\(size_divisor=32\).*, evaluation nothing",
    ),
    "a size": (
        ([resize(64, 64), FLIP], [resize(80, 80)]),
        r"training applies Resize\(scale=\(64, 64\), .*40 x 64 px, "
        r"evaluation Resize\(scale=\(80, 80\), .*50 x 80 px",
    ),
    "a ratio": (
        ([resize(64, 64)], [dict(resize(64, 64), keep_ratio=False)]),
        "keep_ratio=True.* evaluation Resize.*keep_ratio=False",
    ),
    "a ratio of random sizes": (
        ([SCALES], [dict(resize(90, 60), keep_ratio=False)]),
        "only training keeps the aspect ratio",
    ),
    "normalization": (
        ([resize(64, 64), dict(type="Normalize", mean=[0], std=[9])], [resize(64, 64)]),
        r"training applies Normalize\(mean=\[0\], std=\[9\].*, evaluation nothing",
    ),
}


@pytest.mark.parametrize(("pipelines", "words"), UNLIKE.values(), ids=UNLIKE)
def test_other_views_are_named(pipelines, words):
    for train, test in (pipelines, pipelines[::-1]):
        cfg = config(train, test)
        with pytest.raises(ConfigError, match="show an image differently") as caught:
            check_views(cfg)
        cfg.pipeline_check = "off"
        assert check_views(cfg) == []
        if train is pipelines[0]:
            assert caught.match(words)


@pytest.mark.parametrize(
    "load",
    [
        dict(LOAD, color_type="color_ignore_orientation"),  # EXIF
        dict(LOAD, color_type="grayscale"),
        dict(LOAD, imdecode_backend="pillow", color_type="unchanged"),  # RGB, not BGR
    ],
    ids=lambda load: load["color_type"],
)
@pytest.mark.parametrize("train", [[resize(64, 64)], [SCALES]], ids=["size", "sizes"])
def test_other_ways_of_loading_are_named(load, train):
    cfg = config(train, [resize(64, 64)])
    cfg.test_dataloader.dataset.pipeline[0] = load
    with pytest.raises(
        ConfigError, match=r"test_dataloader.*evaluation LoadImage\w+\(\w"
    ):
        check_views(cfg)


def test_a_step_of_several_images_is_reported():
    """mmdet's Mosaic needs other images: what it shows is unknown."""
    cfg = config([dict(type="Mosaic"), resize(64, 64)], [resize(64, 64)])
    notes = check_views(cfg)
    assert ["Mosaic does not run on a single image" in note for note in notes] == [True]


@pytest.mark.parametrize(
    "path",
    ["dino/dino-4scale_r50_8xb2-12e_coco.py", "detr/detr_r50_8xb2-150e_coco.py"],
)
def test_mmdets_own_configs_pass(path):
    assert check_views(Config.fromfile(MMDET_CONFIGS / path)) == []


SHAPES = {  # whether portraits and landscapes of a batch have different sizes
    "one size": ([resize(64, 64)], {}, True),
    "a canvas": ([resize(64, 64), PAD], {}, False),
    "a canvas for landscapes": ([resize(64, 32), dict(PAD, size=(64, 32))], {}, True),
    "a masked canvas": ([resize(64, 64)], dict(pad_size_divisor=64), False),
    "stretched": ([dict(resize(64, 64), keep_ratio=False)], {}, False),
    "random sizes": ([SCALES], {}, False),
}


@pytest.mark.parametrize(
    ("steps", "preprocessor", "differ"), SHAPES.values(), ids=SHAPES
)
def test_training_that_pads_images_for_their_batch_is_noted(
    steps, preprocessor, differ
):
    """Evaluation shows each image alone."""
    cfg = config(steps, steps, model=dict(data_preprocessor=preprocessor))
    assert padding_notes(cfg) == []  # one image per batch
    cfg.train_dataloader.batch_size = 2
    notes = padding_notes(cfg)
    assert ["size=(64, 64)) after Resize" in note for note in notes] == [True] * differ
    cfg.pipeline_check = "off"
    assert padding_notes(cfg) == []


def test_a_run_does_not_start(two_datasets, tmp_path):
    """The command a user types: the error comes before data are read."""
    cfg = config_of("quickstart", ["train_dataloader.num_workers=0"])
    cfg.update(mixture=two_datasets, work_dir=str(tmp_path / "run"))
    cfg.train_dataloader.dataset.pipeline.insert(-1, dict(type="Pad", size=(160, 128)))
    with pytest.raises(ConfigError, match=r"val_dataloader, street\).*Pad\(size="):
        build_runner(cfg)
    assert not (tmp_path / "run").exists()


# --- What the detector is given -------------------------------------------------------


def given(cfg, packed):
    """Tensor and data sample of an image, as the detector gets them."""
    batch = pseudo_collate([packed])
    data = MODELS.build(cfg.model.data_preprocessor)(batch, False)
    ((inputs, (sample,)),) = batches_of_one_shape(*data.values())
    return inputs, sample


@pytest.mark.parametrize("shape", [(60, 96), (96, 60), (20, 90)], ids=str)
@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_shipped_configs_show_an_image_alike(path, shape, tmp_path):
    """Through training without its random steps, evaluation, and the predictor."""
    cfg = config_of(str(path), ["image_size=(96,64)"])
    set_image_size(cfg)
    rng = np.random.default_rng(0)
    file = tmp_path / "image.png"
    Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(file)
    views = [
        view_of(next(iter(pipelines_of(cfg, loader).values())), file)
        for loader in LOADERS
    ]
    if views[0].is_resized:
        views = views[1:]  # random sizes
    packed = [Compose([PACK])(copy.deepcopy(dict(view.shown))) for view in views]
    test = cfg.test_dataloader.dataset.pipeline
    inputs = Inputs([step for step in test if step.type not in ANNOTATION_STEPS])
    tensor, sample = given(
        cfg, {k: v for k, v in inputs(str(file)).items() if k != "pixels"}
    )
    height, width = sample.img_shape
    mask = image_mask_of(tensor, [sample])
    is_padded = (height, width) != tuple(tensor.shape[-2:])
    assert (mask is not None) == is_padded
    if is_padded:  # the border is no image
        assert mask.sum() == mask[0, :height, :width].sum() == height * width
    for one in packed:
        other, twin = given(cfg, one)
        torch.testing.assert_close(other, tensor)
        assert twin.img_shape == sample.img_shape
        assert twin.batch_input_shape == sample.batch_input_shape
