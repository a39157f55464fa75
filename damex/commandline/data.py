"""``damex data``: its subcommands and their arguments.

``NAME_parser`` has the arguments of the subcommand NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from damex.commandline.parser import Parser, asks_for_help, at_least
from damex.errors import ConfigError, did_you_mean

# The names in `damex.datasets.formats.conversion.FORMATS`.
FORMATS = (
    *("coco", "voc", "yolo", "kitti", "dota", "wider_face", "csv"),
    "kitti_detections",
)
EXAMPLES = 3  # printed findings per kind
SLACK = 1.5  # of an expert's share of the samples


def check_parser() -> Parser:
    """Arguments of ``damex data check``."""
    parser = Parser(
        "data check",
        "Check datasets before a training",
        examples=(
            "damex data check my_mixture.py --quick",
            "damex data check data/fish",
            "damex data check --coco train.json --images images/",
        ),
    )
    parser.add_config(optional=True, or_folder=True)
    parser.add_argument("--coco", metavar="FILE", help="check this COCO file alone")
    parser.add_argument("--images", metavar="DIR", help="the images of --coco")
    parser.add_argument("--json", metavar="FILE", help="write all findings to a file")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="neither decode nor compare images; what a training does at its start",
    )
    parser.add_argument(
        "--examples",
        type=at_least(0),
        default=EXAMPLES,
        help="how many findings of a kind are printed (default %(default)s)",
    )
    return parser


def browse_parser() -> Parser:
    """Arguments of ``damex data browse``."""
    parser = Parser(
        "data browse",
        "Write an HTML page and contact sheets of the datasets of a config",
        examples=("damex data browse my_mixture.py --samples 24",),
    )
    parser.add_config(or_folder=True)
    parser.add_argument(
        "--out", help="folder to write to (default work_dirs/<config>/browse)"
    )
    parser.add_argument(
        "--samples",
        type=at_least(1),
        default=12,
        help="images of each split (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of images")
    return parser


def convert_parser() -> Parser:
    """Arguments of ``damex data convert``."""
    parser = Parser(
        "data convert",
        "Read a folder of images and annotations, write COCO json",
        examples=("damex data convert data/fish --out data/fish-coco",),
    )
    parser.add_argument("root", help="the folder; nothing in it is changed")
    parser.add_argument("--out", required=True, help="folder for the COCO files")
    parser.add_argument("--format", choices=FORMATS, help="by default it is found out")
    parser.add_argument(
        "--val-share",
        type=float,
        help="share of the images for validation where the folder has no such split "
        "(default: 0.1)",
    )
    for split in ("train", "val", "test"):
        what = "split, folder, list of images or annotation file inside of the root"
        parser.add_argument(f"--{split}", nargs="+", help=what)
    parser.add_argument("--classes", nargs="+", help="names, where no file names them")
    return parser


def labels_parser() -> Parser:
    """Arguments of ``damex data labels``."""
    parser = Parser(
        "data labels",
        "Print which classes of the datasets become one class, and which look as if "
        "they should, or should not.",
        examples=("damex data labels my_mixture.py --out labels.json",),
    )
    parser.add_config(or_folder=True)
    parser.add_argument(
        "--out", type=Path, metavar="labels.json", help="write a label file to edit"
    )
    return parser


def plan_parser() -> Parser:
    """Arguments of ``damex data plan``."""
    parser = Parser(
        "data plan",
        "Propose which datasets share an expert (Global Expert Mapping).",
        examples=("damex data plan my_mixture.py --experts 8",),
    )
    parser.add_config()
    parser.add_argument("--experts", type=at_least(1), help="default: half as many")
    parser.add_argument(
        "--capacity",
        type=float,
        default=SLACK,
        help="most samples of an expert, in even shares (default: %(default)s)",
    )
    return parser


def prepare_parser() -> Parser:
    """Arguments of ``damex data prepare``."""
    parser = Parser(
        "data prepare",
        "Write COCO files for the configs of a benchmark. Nothing is downloaded, and "
        "no file of the datasets is changed.",
        examples=("damex data prepare uodb kitti voc",),
    )
    parser.add_argument("benchmark", choices=["uodb"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--root", type=Path, default=Path("data/uodb"))
    return parser


# Parsers of the subcommands; each is a function in `damex.curation.NAME` of that name.
COMMANDS = MappingProxyType[str, Callable[[], Parser]](
    {
        "check": check_parser,
        "browse": browse_parser,
        "convert": convert_parser,
        "labels": labels_parser,
        "plan": plan_parser,
        "prepare": prepare_parser,
    }
)


def data(arguments: Sequence[str]) -> int | None:
    """Run the subcommand named by the first argument, or print its help.

    Returns the exit status, None for success.
    """
    name, *rest = arguments or ["--help"]
    if asks_for_help([name]):
        print("usage: damex data COMMAND [--help] ...\n\ncommands:")
        for command, parser in COMMANDS.items():
            about = str(parser().description).partition(". ")[0].rstrip(".")
            print(f"  {command:<9} {about}")
        return None
    if name not in COMMANDS:
        raise ConfigError(
            f"damex data has no command {name!r}; {did_you_mean(name, COMMANDS)}"
        )
    if asks_for_help(rest):
        COMMANDS[name]().print_help()
        return None
    if name not in ("check", "browse", "convert"):  # these need no torch
        import_module("damex.registry")  # first: it keeps mmdet's import silent
    return getattr(import_module(f"damex.curation.{name}"), name)(rest)
