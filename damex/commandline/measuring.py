"""Arguments of the commands that measure: costs, seeds, ladders, layers."""

from __future__ import annotations

from damex.commandline.parser import Parser, at_least

# Optional rungs of the headroom ladder.
RUNGS = ("dense_lr2", "wide_decoder", "wide_encoder", "single", "oracle", "zeroed")


def compare_moe_parser() -> Parser:
    """Arguments of ``damex compare_moe``."""
    parser = Parser(
        "compare_moe",
        "Train one config with several mixtures of experts and seeds",
        examples=("damex compare_moe my_mixture.py --moe dense damex --seeds 0 1 2",),
    )
    parser.add_config()
    add = parser.add_argument
    add(
        "--moe",
        nargs="+",
        help="names of files in configs/_base_/moe, or paths; the first row is what "
        "AP50 and times are compared with (default: dense, then all others)",
    )
    _add_runs(parser, work_dir="work_dirs/compare_moe")
    add(
        "--timed-rounds",
        type=at_least(0),
        default=3,
        help="short runs of each mixture that measure time and memory; 0 for none",
    )
    add("--timed-samples", type=at_least(1), default=320, help="samples in a timed run")
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
        help="beside dense (default: all; none if no name follows)",
    )
    parser.add_argument(
        "--experts",
        nargs="+",
        default=[],
        metavar="MOE",
        help="also train these mixtures of experts, to score the verdict: names of "
        "files in configs/_base_/moe, or paths of files that set moe or more",
    )
    _add_runs(parser, work_dir="work_dirs/headroom")
    return parser


def _add_runs(parser: Parser, *, work_dir: str) -> None:
    """Add the arguments shared by commands with many runs."""
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--work-dir", default=work_dir)
    parser.add_argument(
        "--jobs",
        type=at_least(1),
        default=1,
        help="trainings at a time; they share the cores",
    )


def zero_ffns_parser() -> Parser:
    """Arguments of ``damex zero_ffns``."""
    parser = Parser(
        "zero_ffns",
        "AP of a dense detector without single FFNs",
        examples=("damex zero_ffns my_mixture.py work_dirs/dense/epoch_4.pth",),
    )
    _add_trained(parser)
    return parser


def tell_datasets_parser() -> Parser:
    """Arguments of ``damex tell_datasets``."""
    parser = Parser(
        "tell_datasets",
        "AP of experts that are told the dataset of an image",
        examples=("damex tell_datasets quickstart work_dirs/quickstart/epoch_3.pth",),
    )
    _add_trained(parser)
    return parser


def _add_trained(parser: Parser) -> None:
    """Add a config and its trained checkpoint."""
    parser.add_config()
    parser.add_argument("checkpoint", help="a .pth file that the config trained")
    parser.add_argument("--work-dir", help="folder for the log and summary.json")
    parser.set_defaults(launcher="none")


def complexity_parser() -> Parser:
    """Arguments of ``damex complexity``."""
    parser = Parser(
        "complexity",
        "Parameters and FLOPs of a config: total, active, and dense",
        examples=("damex complexity quickstart --classes 24 --groups 5",),
    )
    parser.add_config()
    parser.add_argument(
        "--shape",
        nargs=2,
        type=at_least(1),
        metavar=("HEIGHT", "WIDTH"),
        help="image size in pixels (default: that of Resize in test_pipeline)",
    )
    parser.add_argument(
        "--classes",
        type=at_least(1),
        help="number of classes, to count without the datasets",
    )
    parser.add_argument(
        "--groups",
        type=at_least(1),
        help="dataset groups, beside --classes (default: 2)",
    )
    return parser


def benchmark_parser() -> Parser:
    """Arguments of ``damex benchmark``."""
    parser = Parser(
        "benchmark",
        "Time layers of experts beside the FFN that they replace",
        examples=(
            "damex benchmark --small",
            "damex benchmark --device cuda --out work_dirs/gpu.md",
        ),
    )
    parser.add_argument(
        "--out", default="work_dirs/benchmark.md", help="report in Markdown"
    )
    parser.add_argument("--small", action="store_true", help="three quick cases")
    parser.add_argument("--rounds", type=at_least(1), default=11)
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 is by autocast; routers stay in float32",
    )
    return parser
