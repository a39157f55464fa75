"""Arguments of commands on detectors: ``NAME_parser`` for ``damex NAME``."""

from __future__ import annotations

from damex.commandline.parser import Parser, at_least, share

LAUNCHERS = ("none", "pytorch", "slurm", "mpi")
# Optional rungs of the headroom ladder.
RUNGS = ("dense_lr2", "wide_decoder", "wide_encoder", "single", "oracle", "zeroed")


def train_parser() -> Parser:
    """Arguments of ``damex train``."""
    parser = Parser(
        "train",
        "Train a detector on a mixture of datasets",
        examples=(
            "damex train quickstart",
            "damex train configs/my_mixture.py --cfg-options max_epochs=12 moe=dense",
            "damex train configs/my_mixture.py --resume",
        ),
    )
    parser.add_config()
    _add_run(parser)
    parser.add_argument("--amp", action="store_true", help="mixed-precision training")
    parser.add_argument(
        "--auto-scale-lr",
        action="store_true",
        help="scale the learning rate by the batch size of all processes",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        help="continue from a checkpoint; without a path from the last one of work-dir",
    )
    return parser


def test_parser() -> Parser:
    """Arguments of ``damex test``."""
    parser = Parser(
        "test",
        "Evaluate a checkpoint per dataset",
        examples=(
            "damex test quickstart work_dirs/quickstart/epoch_3.pth",
            "damex test configs/my_mixture.py epoch_4.pth --show-dir painted",
        ),
    )
    parser.add_config()
    _add_run(parser)
    parser.add_argument("checkpoint", help="a .pth file")
    parser.add_argument("--out", help="write all predictions to this pickle file")
    parser.add_argument("--show", action="store_true", help="show predictions")
    parser.add_argument("--show-dir", help="write painted images to this folder")
    parser.add_argument(
        "--wait-time", type=float, default=2, help="seconds per shown image"
    )
    return parser


def _add_run(parser: Parser) -> None:
    """Add the arguments shared by training and testing."""
    parser.add_argument("--work-dir", help="folder for logs and checkpoints")
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="none",
        help="how processes were started; torchrun is 'pytorch'",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)


def predict_parser() -> Parser:
    """Arguments of ``damex predict``."""
    parser = Parser(
        "predict",
        "Detect objects in images and videos; the checkpoint alone is enough",
        examples=(
            "damex predict epoch_3.pth photo.jpg --draw seen",
            "damex predict epoch_3.pth photos/ --json found.json --csv found.csv",
            "damex predict epoch_3.pth 'photos/*.png' --dataset boards --min-score 0.5",
            "damex predict epoch_3.pth clip.mp4 --draw seen",
        ),
    )
    parser.add_checkpoint()
    add = parser.add_argument
    add("images", nargs="+", help="files, folders (with all below them), or patterns")
    add(
        "--dataset",
        default="auto",
        metavar="auto|NAME|all",
        help="whose classes to look for: auto, those of the dataset that the detector "
        "takes the image to be of (the default); those of one dataset; or all",
    )
    add("--json", metavar="FILE", help="write a COCO json of images and detections")
    add("--csv", metavar="FILE", help="write one row per detection")
    add("--draw", metavar="FOLDER", help="write images and videos with detections")
    add(
        "--min-score",
        type=share,
        default=0.3,
        help="leave out detections below it (default %(default)s)",
    )
    add(
        "--min-probability",
        type=share,
        default=0.5,
        help="warn where no dataset of the mixture is as probable as this (default "
        "%(default)s); needs --dataset auto",
    )
    add("--batch-size", type=at_least(1), default=8, help="(default %(default)s)")
    add("--device", help="such as cpu or cuda:0 (default: a GPU where there is one)")
    return parser


def export_parser() -> Parser:
    """Arguments of ``damex export``."""
    parser = Parser(
        "export",
        "Take a dense detector for one dataset out of a mixture of experts: a "
        "checkpoint and a config of mmdet that need no damex, or an ONNX graph that "
        "needs onnxruntime alone; or write the whole mixture as such a graph",
        examples=(
            "damex export epoch_3.pth --dataset boards --out boards.pth",
            "damex export epoch_3.pth --dataset boards --out boards.onnx",
            "damex export epoch_3.pth --out mixture.onnx",
        ),
    )
    parser.add_checkpoint()
    add = parser.add_argument
    add(
        "--dataset",
        metavar="NAME",
        help="a dataset of its mixture (default: the whole mixture, as .onnx alone)",
    )
    add(
        "--out",
        required=True,
        metavar="FILE.pth|FILE.onnx",
        help="the new checkpoint, with its config beside it as FILE.py; or the graph",
    )
    add(
        "--image-size",
        nargs=2,
        type=at_least(1),
        metavar=("WIDTH", "HEIGHT"),
        help="to which FILE.onnx resizes images; it takes them in any size (default: "
        "that of the training's evaluation)",
    )
    return parser


def experts_parser() -> Parser:
    """Arguments of ``damex experts``."""
    parser = Parser(
        "experts",
        "Look inside a mixture of experts: which dataset's tokens, and which regions "
        "of images, go to which expert; one HTML page, from the checkpoint alone",
        examples=(
            "damex experts work_dirs/quickstart/epoch_3.pth",
            "damex experts epoch_3.pth --images boards/ ships/ --out look",
        ),
    )
    parser.add_checkpoint()
    add = parser.add_argument
    add(
        "--images",
        nargs="+",
        metavar="IMAGE",
        help="files, folders or patterns; the images of one folder are one row of the "
        "tables (default: validation images of the mixture, where they were in the "
        "training)",
    )
    add("--out", metavar="FOLDER", help="(default: CHECKPOINT_experts, here)")
    add(
        "--images-per-dataset",
        type=at_least(1),
        default=8,
        help="without --images (default %(default)s)",
    )
    add(
        "--examples",
        type=at_least(0),
        default=2,
        help="images of each dataset with the regions of experts (default %(default)s)",
    )
    add("--batch-size", type=at_least(1), default=8, help="(default %(default)s)")
    add("--device", help="such as cpu or cuda:0 (default: a GPU where there is one)")
    return parser


def grow_parser() -> Parser:
    """Arguments of ``damex grow``."""
    parser = Parser(
        "grow",
        "Make room in a trained detector for new datasets: a checkpoint to start a "
        "training from",
        examples=(
            "damex grow epoch_12.pth configs/with_cells.py --out grown.pth",
            "damex grow epoch_12.pth with_cells.py --out grown.pth --like boards",
        ),
    )
    parser.add_checkpoint()
    add = parser.add_argument
    parser.add_config()
    add("--out", required=True, metavar="FILE.pth", help="the new checkpoint")
    add(
        "--like",
        default="auto",
        metavar="auto|NAME|none",
        help="whose experts the new ones start as: auto, those of the dataset that the "
        "new images look like (the default); those of a dataset; or none, as at the "
        "start of a training",
    )
    add(
        "--images",
        type=at_least(1),
        default=64,
        help="new images to look at (default %(default)s)",
    )
    return parser


def prune_parser() -> Parser:
    """Arguments of ``damex prune``."""
    parser = Parser(
        "prune",
        "Take datasets away from a trained detector, with the classes and experts that "
        "no other dataset has",
        examples=("damex prune epoch_12.pth --drop cells --out smaller.pth",),
    )
    parser.add_checkpoint()
    parser.add_argument(
        "--drop", required=True, nargs="+", metavar="NAME", help="datasets"
    )
    _add_out(parser)
    return parser


def merge_parser() -> Parser:
    """Arguments of ``damex merge``."""
    parser = Parser(
        "merge",
        "Let datasets of a trained detector share the mean of their experts, and "
        "evaluate what it costs",
        examples=("damex merge epoch_12.pth --datasets ships boats --out smaller.pth",),
    )
    parser.add_checkpoint()
    add = parser.add_argument
    add("--datasets", required=True, nargs="+", metavar="NAME", help="two or more")
    _add_out(parser)
    add(
        "--no-test",
        action="store_true",
        help="do not evaluate; without it the validation images of the mixture have to "
        "be where they were in the training",
    )
    return parser


def _add_out(parser: Parser) -> None:
    """Add the output file of a changed checkpoint."""
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE.pth",
        help="the new checkpoint; its config is written beside it, as FILE.py",
    )


def doctor_parser() -> Parser:
    """Arguments of ``damex doctor``."""
    parser = Parser(
        "doctor",
        "Check the installation and print how to mend each problem",
        examples=("damex doctor",),
    )
    silent = "print nothing unless there is a problem"
    parser.add_argument("--quiet", action="store_true", help=silent)
    return parser


def headroom_parser() -> Parser:
    """Arguments of ``damex headroom``."""
    parser = Parser(
        "headroom",
        "Train the headroom ladder of a config: what experts could win",
        examples=(
            "damex headroom my_mixture.py --seeds 0 1 2 --rungs single",
            "damex headroom my_mixture.py --experts damex_best",
        ),
    )
    parser.add_config()
    parser.add_argument(
        "--rungs",
        nargs="*",
        choices=RUNGS,
        default=list(RUNGS),
        help="in addition to dense (default: all; none if no name follows)",
    )
    parser.add_argument(
        "--experts",
        nargs="+",
        default=[],
        metavar="MOE",
        help="also train these mixtures of experts, to score the verdict: names of "
        "files in configs/_base_/moe, or paths of files that set moe or more",
    )
    parser.add_runs(work_dir="work_dirs/headroom")
    return parser
