"""The program ``damex`` and the options of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter
from cyclopts.validators import Number

from damex.workbench.cli.data import data
from damex.workbench.cli.run import (
    CfgOptions,
    Checkpoint,
    ConfigName,
    Device,
    Jobs,
    NonNegativeInt,
    PositiveInt,
    Seeds,
    Share,
    Trust,
    command,
    program,
)
from damex.workbench.zero_config import models_help

# As `damex.engine.config.LAUNCHERS`, which takes seconds to import.
Launcher = Literal["none", "pytorch", "slurm", "mpi"]
# What `damex headroom` trains besides the dense detector.
DefaultBaseline = Literal[
    "dense_lr2", "partitioned", "wide_decoder", "wide_encoder", "single", "oracle"
]
BASELINES: tuple[DefaultBaseline, ...] = get_args(DefaultBaseline)
# As many times the compute as there are datasets.
Baseline = Literal[DefaultBaseline, "single_full"]
LocalRank = Annotated[int, Parameter(name=("--local-rank", "--local_rank"), show=False)]
NewCheckpoint = Annotated[str, Parameter(metavar="FILE.pth")]

app = program(
    "damex",
    "Train one detector on several datasets, and use it.",
    "damex train quickstart",
    "damex predict work_dirs/quickstart/epoch_3.pth photos/ --draw seen",
    "damex data check configs/my_mixture.py",
    "damex COMMAND --help",
)


@command(
    app,
    "cli.train",
    "damex train quickstart",
    "damex train --data fish=data/fish data/boards --epochs 12",
    "damex train --data data/cats data/dogs --complete",
    "damex train --data data/birds data/streets --tile streets=320",
    "damex train configs/my_mixture.py --cfg-options max_epochs=12 moe=dense",
    "damex train configs/my_mixture.py --resume",
)
def train(
    config: ConfigName | None = None,
    /,
    *,
    data: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="[NAME=]FOLDER...",
            help="Datasets to train on, in place of a config; a dataset has the "
            "name of its folder unless you give a NAME.",
        ),
    ] = (),
    model: Annotated[str | None, Parameter(help=models_help())] = None,
    tile: Annotated[tuple[str, ...], Parameter(metavar="[NAME=]PIXELS|auto...")] = (),
    epochs: PositiveInt | None = None,
    device: Device = None,
    cfg_options: CfgOptions = (),
    work_dir: str | None = None,
    launcher: Launcher = "none",
    local_rank: LocalRank = 0,
    amp: bool = False,
    auto_scale_lr: bool = False,
    resume: Annotated[
        tuple[str, ...] | None,
        Parameter(metavar="[CHECKPOINT]", consume_multiple=(0, 1)),
    ] = None,
    complete: bool = False,
) -> None:
    """Train a detector on several datasets.

    Args:
        tile: Windows for small objects: their side in pixels of the images, for all
            datasets or for NAME; 'auto' chooses from the sizes of the boxes.
        epochs: Number of epochs (default: that of the config).
        work_dir: Folder for logs and checkpoints.
        launcher: How the processes were started; 'pytorch' for torchrun.
        amp: Train in mixed precision; needs a GPU.
        auto_scale_lr: Scale the learning rate by the batch size of all processes.
        resume: Continue from a checkpoint (default: the last one in the work dir).
        complete: With --data: after half of the epochs, write the labels that a dataset
            lacks and another has, and train on (see damex data complete).
    """


@command(
    app,
    "cli.train",
    "damex test quickstart work_dirs/quickstart/epoch_3.pth",
    "damex test configs/my_mixture.py epoch_4.pth --show-dir painted",
)
def test(
    config: ConfigName,
    checkpoint: str,
    /,
    *,
    cfg_options: CfgOptions = (),
    work_dir: str | None = None,
    launcher: Launcher = "none",
    local_rank: LocalRank = 0,
    device: Device = None,
    classwise: bool = False,
    out: Annotated[str | None, Parameter(metavar="FILE.pkl")] = None,
    show: bool = False,
    show_dir: str | None = None,
    wait_time: float = 2,
) -> None:
    """Evaluate a checkpoint per dataset.

    Args:
        checkpoint: The .pth file, or the folder of a card, to evaluate.
        work_dir: Folder for logs and scores.
        launcher: How the processes were started; 'pytorch' for torchrun.
        classwise: Add the AP of each class, and how many images of each dataset went to
            the experts of another.
        out: Write all predictions to this pickle file.
        show: Show images with predictions in a window.
        show_dir: Write images with predictions to this folder, below the log folder.
        wait_time: Seconds per shown image.
    """


@command(
    app,
    "cli.predict",
    "damex predict epoch_3.pth photo.jpg --draw seen",
    "damex predict epoch_3.pth photos/ --json found.json --csv found.csv",
    "damex predict epoch_3.pth 'photos/*.png' --dataset boards --min-score 0.5",
    "damex predict epoch_3.pth clip.mp4 --draw seen",
)
def predict(
    checkpoint: Checkpoint,
    images: tuple[str, ...],
    /,
    *,
    dataset: Annotated[str, Parameter(metavar="auto|NAME|all")] = "auto",
    json: str | None = None,
    csv: str | None = None,
    draw: str | None = None,
    min_score: Share = 0.3,
    min_probability: Share = 0.5,
    batch_size: PositiveInt = 8,
    tile: Annotated[
        int | None, Parameter(metavar="PIXELS", validator=Number(gte=16))
    ] = None,
    no_tile: bool = False,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Detect objects in images and videos; the checkpoint alone is enough.

    Args:
        images: Images and videos: files, folders (searched recursively), or patterns.
        dataset: Whose classes to detect: those of the dataset that an image most
            probably belongs to (auto), of the dataset NAME, or of all datasets.
        json: Write a COCO file of images and detections.
        csv: Write a table with a row per detection.
        draw: Write images and videos with detections to this folder.
        min_score: Leave out detections below this score.
        min_probability: Mark images whose dataset is less probable; for auto and all.
        batch_size: Images per batch.
        tile: Look through windows of this side (default: as in the training of the
            dataset).
        no_tile: Look at whole images.
    """


@command(
    app,
    "export.export",
    "damex export epoch_3.pth --dataset boards --out boards.pth",
    "damex export epoch_3.pth --dataset boards --out boards.onnx",
    "damex export epoch_3.pth --dataset boards --out boards/",
    "damex export epoch_3.pth --out mixture.onnx",
)
def export(
    checkpoint: Checkpoint,
    /,
    *,
    out: Annotated[str, Parameter(metavar="FILE.pth|FILE.onnx|FOLDER/")],
    dataset: str | None = None,
    image_size: Annotated[
        tuple[PositiveInt, PositiveInt] | None, Parameter(metavar="WIDTH HEIGHT")
    ] = None,
    trust: Trust = False,
) -> None:
    """Export a detector to ONNX or Transformers, or that of one dataset to mmdet.

    A .pth file with its config is for mmdet without damex, a folder for Transformers
    without damex (of a MoETransformersDetector); a .onnx file is for onnxruntime alone.

    Args:
        out: The new checkpoint, with its config as FILE.py; the ONNX graph; or the
            folder.
        dataset: Export the dense detector of this dataset (default: the detector with
            all datasets and experts; no .pth).
        image_size: Size in pixels to which FILE.onnx or the image processor of the
            folder resizes images (default: that of the test pipeline in the config).
    """


@command(
    app,
    "card",
    "damex card epoch_3.pth --out boards --license CC-BY-4.0",
    "damex card epoch_3.pth --out boards --data-license fish=CC0",
)
def card(
    checkpoint: Checkpoint,
    /,
    *,
    out: Annotated[str, Parameter(metavar="FOLDER")],
    license_text: Annotated[
        str | None, Parameter(metavar="TEXT", name="--license")
    ] = None,
    data_licenses: Annotated[
        tuple[str, ...], Parameter(metavar="NAME=TEXT...", name="--data-license")
    ] = (),
    trust: Trust = False,
) -> None:
    """Write a model as a folder for others: safetensors, JSON and a model card.

    The folder takes the place of a checkpoint in all commands. Nothing in it is code.

    Args:
        out: The new folder.
        license_text: License of the weights, for the card.
        data_licenses: License of each dataset, for the card.
    """


@command(
    app,
    "experts",
    "damex experts work_dirs/quickstart/epoch_3.pth",
    "damex experts epoch_3.pth --images boards/ ships/ --out experts.png",
)
def experts(
    checkpoint: Checkpoint,
    /,
    *,
    images: tuple[str, ...] = (),
    out: Annotated[str | None, Parameter(metavar="FILE.png")] = None,
    images_per_dataset: PositiveInt = 8,
    batch_size: PositiveInt = 8,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Show which expert each dataset uses.

    Args:
        images: Files, folders or patterns; the images of one folder are one row of the
            tables (default: validation images of the mixture, if they are available).
        out: Draw the share of each dataset's tokens by expert and layer.
        images_per_dataset: Number of validation images, without --images.
        batch_size: Images per batch.
    """


@command(
    app,
    "growth.grow",
    "damex grow epoch_12.pth configs/with_cells.py --out grown.pth",
    "damex grow epoch_12.pth with_cells.py --out grown.pth --like boards",
)
def grow(
    checkpoint: Checkpoint,
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    out: NewCheckpoint,
    like: Annotated[str, Parameter(metavar="auto|NAME|none")] = "auto",
    images: PositiveInt = 64,
    trust: Trust = False,
) -> None:
    """Add new datasets to a checkpoint, to continue training on old and new ones.

    CONFIG is that of the training to come: with the old datasets and the new ones.

    Args:
        out: The new checkpoint.
        like: Old experts to copy for a new dataset: those of the dataset that its
            images look like (auto), of the dataset NAME, or none.
        images: Number of images of each new dataset to compare, with --like auto.
    """


@command(app, "growth.prune", "damex prune epoch_12.pth --drop cells --out smaller.pth")
def prune(
    checkpoint: Checkpoint,
    /,
    *,
    drop: tuple[str, ...],
    out: NewCheckpoint,
    trust: Trust = False,
) -> None:
    """Remove datasets from a detector, with their classes and experts.

    Args:
        drop: Datasets to remove; classes and experts of others are kept.
        out: The new checkpoint; its config is written to FILE.py.
    """


@command(
    app,
    "growth.prune",
    "damex merge epoch_12.pth --datasets ships boats --out smaller.pth",
)
def merge(
    checkpoint: Checkpoint,
    /,
    *,
    datasets: tuple[str, ...],
    out: NewCheckpoint,
    no_test: bool = False,
    trust: Trust = False,
) -> None:
    """Average the experts of several datasets into one, and print the change in AP.

    Args:
        datasets: Two or more datasets, which then share an expert.
        out: The new checkpoint; its config is written to FILE.py.
        no_test: Skip the evaluation, which needs the validation images.
    """


data.sort_key = len([*app])
app.command(data)


@command(app, "toydata", "damex toydata --out data/toy")
def toydata(*, out: Path = Path("data/toy"), seed: NonNegativeInt = 0) -> None:
    """Generate the toy mixture of five small datasets in a new folder.

    Args:
        out: Output folder; left as it is if it has the mixture of this seed.
        seed: Random seed of the images.
    """


@command(app, "doctor", "damex doctor")
def doctor(*, quiet: bool = False) -> None:
    """Check the installation, and print how to fix each problem.

    Args:
        quiet: Print nothing unless there is a problem.
    """


@command(
    app,
    "headroom.command",
    "damex headroom my_mixture.py --seeds 0 1 2 --baselines single",
    "damex headroom my_mixture.py --experts damex_best",
)
def headroom(
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    baselines: Annotated[
        tuple[Baseline, ...], Parameter(consume_multiple=True)
    ] = BASELINES,
    experts: Annotated[tuple[str, ...], Parameter(metavar="MOE...")] = (),
    seeds: Seeds = (0, 1, 2),
    work_dir: str = "work_dirs/headroom",
    jobs: Jobs = 1,
    amp: bool = False,
) -> None:
    """Train dense baselines of a config, to see how much experts could gain.

    Args:
        baselines: What to train besides dense; none if no name follows.
        experts: Mixtures of experts to train and compare: names of files in
            configs/_base_/moe, or paths of config files that set moe.
        work_dir: Folder for the runs and the report.
        amp: Train in mixed precision; needs a GPU.
    """
