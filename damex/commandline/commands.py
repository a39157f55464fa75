"""The program ``damex`` and the options of its commands."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from damex.commandline.data import data
from damex.commandline.run import (
    CfgOptions,
    Checkpoint,
    ConfigName,
    Jobs,
    NonNegativeInt,
    PositiveInt,
    Seeds,
    Share,
    command,
    parameter,
    program,
)
from damex.zero_config import models_help

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
LAUNCHERS: tuple[str, ...] = get_args(Launcher)
# Optional rungs of the headroom ladder.
Baseline = Literal[
    "dense_lr2",
    "partitioned",
    "wide_decoder",
    "wide_encoder",
    "single",
    "oracle",
    "zeroed",
]
RUNGS: tuple[Baseline, ...] = get_args(Baseline)
LocalRank = Annotated[int, Parameter(name=("--local-rank", "--local_rank"), show=False)]
NewCheckpoint = Annotated[str, parameter("FILE.pth")]

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
    "damex.engine.cli",
    "damex train quickstart",
    "damex train --data fish=data/fish data/boards --epochs 12",
    "damex train configs/my_mixture.py --cfg-options max_epochs=12 moe=dense",
    "damex train configs/my_mixture.py --resume",
)
def train(
    config: ConfigName | None = None,
    /,
    *,
    data: Annotated[
        tuple[str, ...],
        parameter(
            "[NAME=]FOLDER...",
            help="Datasets to train on, in place of a config; a dataset is called like "
            "its folder unless it has a NAME.",
        ),
    ] = (),
    model: Annotated[str | None, Parameter(help=models_help())] = None,
    epochs: PositiveInt | None = None,
    device: Annotated[str | None, parameter("cpu|cuda|cuda:N")] = None,
    cfg_options: CfgOptions = (),
    work_dir: str | None = None,
    launcher: Launcher = "none",
    local_rank: LocalRank = 0,
    amp: bool = False,
    auto_scale_lr: bool = False,
    resume: Annotated[
        tuple[str, ...] | None,
        parameter("[CHECKPOINT]", consume_multiple=(0, 1)),
    ] = None,
) -> None:
    """Train a detector on several datasets.

    Args:
        epochs: Length of the training (default: that of the config).
        device: Where to train (default: a GPU if available).
        work_dir: Folder for logs and checkpoints.
        launcher: How the processes were started; 'pytorch' for torchrun.
        amp: Mixed-precision training.
        auto_scale_lr: Scale the learning rate by the batch size of all processes.
        resume: Continue from a checkpoint (default: the last one in the work dir).
    """


@command(
    app,
    "damex.engine.cli",
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
    classwise: bool = False,
    out: Annotated[str | None, parameter("FILE.pkl")] = None,
    show: bool = False,
    show_dir: str | None = None,
    wait_time: float = 2,
) -> None:
    """Evaluate a checkpoint per dataset.

    Args:
        checkpoint: A .pth file.
        work_dir: Folder for logs and scores.
        launcher: How the processes were started; 'pytorch' for torchrun.
        classwise: Add the AP of each class, and which dataset's images went to the
            experts of which dataset.
        out: Write all predictions to this pickle file.
        show: Show predictions.
        show_dir: Write images with predictions to this folder.
        wait_time: Seconds per shown image.
    """


@command(
    app,
    "damex.inference.predict",
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
    dataset: Annotated[str, parameter("auto|NAME|all")] = "auto",
    json: str | None = None,
    csv: str | None = None,
    draw: str | None = None,
    min_score: Share = 0.3,
    min_probability: Share = 0.5,
    batch_size: PositiveInt = 8,
    device: str | None = None,
) -> None:
    """Detect objects in images and videos; the checkpoint alone is enough.

    Args:
        images: Files, folders (with all below them), or patterns.
        dataset: Classes to detect: of the dataset that the image most probably belongs
            to (auto), of a dataset, or all.
        json: Write a COCO file of images and detections.
        csv: Write a row per detection.
        draw: Write images and videos with detections to this folder.
        min_score: Leave out detections below this score.
        min_probability: Warn if no dataset is as probable as this; for --dataset auto.
        batch_size: Images per batch.
        device: For example cpu or cuda:0 (default: a GPU if available).
    """


@command(
    app,
    "damex.inference.export",
    "damex export epoch_3.pth --dataset boards --out boards.pth",
    "damex export epoch_3.pth --dataset boards --out boards.onnx",
    "damex export epoch_3.pth --out mixture.onnx",
)
def export(
    checkpoint: Checkpoint,
    /,
    *,
    out: Annotated[str, parameter("FILE.pth|FILE.onnx")],
    dataset: str | None = None,
    image_size: Annotated[
        tuple[PositiveInt, PositiveInt] | None, parameter("WIDTH HEIGHT")
    ] = None,
) -> None:
    """Export a dense detector for one dataset, or the whole mixture, to mmdet or ONNX.

    A .pth file with its config is for mmdet without damex; a .onnx file is for
    onnxruntime alone.

    Args:
        out: The new checkpoint, with its config as FILE.py; or the ONNX graph.
        dataset: A dataset of the mixture (default: the whole mixture; .onnx only).
        image_size: Size to which FILE.onnx resizes images of any size (default: that
            of the evaluation in training).
    """


@command(
    app,
    "damex.inference.routing_report",
    "damex experts work_dirs/quickstart/epoch_3.pth",
    "damex experts epoch_3.pth --images boards/ ships/ --out look",
)
def experts(
    checkpoint: Checkpoint,
    /,
    *,
    images: tuple[str, ...] = (),
    out: str | None = None,
    images_per_dataset: PositiveInt = 8,
    examples: NonNegativeInt = 2,
    batch_size: PositiveInt = 8,
    device: str | None = None,
) -> None:
    """Show which datasets and image regions go to which expert, as an HTML page.

    Args:
        images: Files, folders or patterns; the images of one folder are one row of the
            tables (default: validation images of the mixture, if they are available).
        out: Output folder (default: CHECKPOINT_experts).
        images_per_dataset: Without --images.
        examples: Images of each dataset with the regions of experts.
        batch_size: Images per batch.
        device: For example cpu or cuda:0 (default: a GPU if available).
    """


@command(
    app,
    "damex.growth.commands",
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
    like: Annotated[str, parameter("auto|NAME|none")] = "auto",
    images: PositiveInt = 64,
) -> None:
    """Add new datasets to a trained detector, to start a training from.

    Args:
        out: The new checkpoint.
        like: Initial weights of the new experts: those of the dataset that the new
            images look like (auto), of a dataset, or as at the start of a training
            (none).
        images: Number of new images to compare.
    """


@command(
    app,
    "damex.growth.commands",
    "damex prune epoch_12.pth --drop cells --out smaller.pth",
)
def prune(
    checkpoint: Checkpoint, /, *, drop: tuple[str, ...], out: NewCheckpoint
) -> None:
    """Remove datasets from a detector, with their classes and experts.

    Args:
        drop: Names of datasets; what others use, too, is kept.
        out: The new checkpoint; its config is written to FILE.py.
    """


@command(
    app,
    "damex.growth.commands",
    "damex merge epoch_12.pth --datasets ships boats --out smaller.pth",
)
def merge(
    checkpoint: Checkpoint,
    /,
    *,
    datasets: tuple[str, ...],
    out: NewCheckpoint,
    no_test: bool = False,
) -> None:
    """Let datasets of a detector share the mean of their experts, and evaluate it.

    Args:
        datasets: Names of two or more datasets.
        out: The new checkpoint; its config is written to FILE.py.
        no_test: Do not evaluate, which needs the validation images of the mixture.
    """


data.sort_key = len([*app])
app.command(data)


@command(app, "damex.doctor", "damex doctor")
def doctor(*, quiet: bool = False) -> None:
    """Check the installation, and print how to fix each problem.

    Args:
        quiet: Print nothing unless there is a problem.
    """


@command(
    app,
    "damex.headroom.command",
    "damex headroom my_mixture.py --seeds 0 1 2 --rungs single",
    "damex headroom my_mixture.py --experts damex_best",
)
def headroom(
    config: ConfigName,
    /,
    *,
    cfg_options: CfgOptions = (),
    rungs: Annotated[tuple[Baseline, ...], Parameter(consume_multiple=True)] = RUNGS,
    experts: Annotated[tuple[str, ...], parameter("MOE...")] = (),
    seeds: Seeds = (0, 1, 2),
    work_dir: str = "work_dirs/headroom",
    jobs: Jobs = 1,
    amp: bool = False,
) -> None:
    """Train the headroom ladder of a config, to see how much experts could gain.

    Args:
        rungs: Rungs in addition to dense; none without a name.
        experts: Also train these mixtures of experts: names of files in
            configs/_base_/moe, or paths of files that set moe or more.
        work_dir: Folder for the trainings and the report.
        amp: Mixed-precision training.
    """
