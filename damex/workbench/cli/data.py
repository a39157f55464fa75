"""``damex data``: options of its commands."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from damex.workbench.cli.run import (
    CfgOptions,
    Checkpoint,
    Device,
    NonNegativeInt,
    PositiveInt,
    Share,
    Trust,
    command,
    program,
)

# The names of `damex.workbench.formats.conversion.FORMATS`, which imports slowly.
Format = Literal[
    "coco", "voc", "yolo", "kitti", "dota", "wider_face", "csv", "kitti_detections"
]
data = program(
    "data",
    "Check, show and convert datasets before training.",
    "damex data check configs/my_mixture.py",
)


@command(
    data,
    "check.check",
    "damex data check my_mixture.py --quick",
    "damex data check data/fish boards=data/boards",
    "damex data check --coco train.json --images images/",
)
def check(
    data: tuple[str, ...] = (),
    /,
    *,
    cfg_options: CfgOptions = (),
    coco: str | None = None,
    images: str | None = None,
    json: str | None = None,
    quick: bool = False,
    examples: NonNegativeInt = 3,
) -> None:
    """Check the annotations and images of datasets.

    Args:
        data: Folders of datasets, [NAME=]FOLDER as in damex train --data; or a config.
        coco: A COCO file to check instead.
        images: The image folder of --coco.
        json: Write all findings to this file.
        quick: Decode only images that look cut off, and find no copies among images, as
            in the check before each training.
        examples: Number of findings to print of each kind.
    """


@command(
    data,
    "check.browse",
    "damex data browse my_mixture.py --samples 24",
    "damex data browse data/fish boards=data/boards",
)
def browse(
    data: tuple[str, ...],
    /,
    *,
    cfg_options: CfgOptions = (),
    out: str | None = None,
    samples: PositiveInt = 12,
    seed: int = 0,
) -> None:
    """Write an HTML page and contact sheets of datasets.

    Args:
        data: Folders of datasets, [NAME=]FOLDER as in damex train --data; or a config.
        out: Output folder (default: work_dirs/NAME/browse, of the config or datasets).
        samples: Number of images of each split.
        seed: Random seed for choosing the images.
    """


@command(data, "check.prepare", "damex data convert data/fish --out data/fish-coco")
def convert(
    root: str,
    /,
    *,
    out: str,
    format: Format | None = None,
    val_share: float | None = None,
    train: tuple[str, ...] = (),
    val: tuple[str, ...] = (),
    test: tuple[str, ...] = (),
    classes: tuple[str, ...] = (),
) -> None:
    """Read a folder of images and annotations, and write COCO files.

    Args:
        root: The folder; nothing in it is changed.
        out: Folder for the COCO files.
        format: Format of the annotations (default: detected).
        val_share: Share of the images for validation if the folder has no such split
            (default: 0.1).
        train: Training images: a split, folder, list of images or annotation file in
            ROOT.
        val: Validation images, named in the same way.
        test: Test images, named in the same way.
        classes: Class names, if no file lists them.
    """


@command(
    data,
    "check.labels",
    "damex data labels data/fish boards=data/boards --out labels.json",
    "damex data labels my_mixture.py",
)
def labels(
    data: tuple[str, ...],
    /,
    *,
    cfg_options: CfgOptions = (),
    out: Annotated[str | None, Parameter(metavar="FILE.json")] = None,
) -> None:
    """Print which classes of the datasets are merged, and which may mean the same.

    Args:
        data: Folders of datasets, [NAME=]FOLDER as in damex train --data; or a config.
        out: Write these classes to a label file that you can edit.
    """


@command(
    data,
    "complete.complete",
    "damex data complete epoch_3.pth --out completed",
    "damex data complete epoch_3.pth --data data/photos data/street --out completed",
    "damex data complete --from found.json --data photos street --out completed",
    "damex data complete --out completed/photos --delete 901 914",
)
def complete(
    checkpoint: Checkpoint | None = None,
    /,
    *,
    data: Annotated[tuple[str, ...], Parameter(metavar="[NAME=]FOLDER...")] = (),
    out: str,
    detections: Annotated[
        str | None, Parameter(metavar="FILE.json", name="--from")
    ] = None,
    classes: tuple[str, ...] = (),
    min_score: Share | None = None,
    delete: Annotated[tuple[int, ...], Parameter(metavar="ID...")] = (),
    samples: NonNegativeInt = 24,
    batch_size: PositiveInt = 8,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Write the labels that a dataset lacks and another one has.

    A detector finds them. Each class gets its threshold on the validation images of the
    datasets that label it: confident detections become labels, uncertain ones
    are ignored by the loss. Existing labels are not changed.

    Args:
        data: Folders of the datasets (default: the datasets of the checkpoint).
        out: The new folder, with a folder for each dataset; or, with --delete, the
            folder of one.
        detections: Instead of a checkpoint: detections of another model in all images,
            a COCO file whose annotations have scores.
        classes: Classes to look for (default: all that the teacher finds). Leave out
            those that the images of the other datasets never show.
        min_score: Score from which detections become labels, for all classes; from half
            of it they are ignored.
        delete: Delete predicted labels with these ids.
        samples: Number of images of each dataset on the page.
        batch_size: Images per batch.
    """


@command(data, "check.prepare", "damex data prepare uodb kitti voc")
def prepare(
    benchmark: Literal["uodb"],
    names: tuple[str, ...] = (),
    /,
    *,
    root: str = "data/uodb",
) -> None:
    """Write COCO files for the configs of a benchmark; nothing is downloaded.

    Args:
        benchmark: Name of the benchmark.
        names: Datasets to convert (default: all); their own files are not changed.
        root: Folder with a folder for each dataset.
    """
