"""``damex card``: a model as a folder that others can load and judge.

Weights and config are data (`damex.engine.model_folder`); README.md, the model card,
describes the model, its training data and its scores.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from damex import __version__
from damex.datasets.coco_records import read_coco
from damex.datasets.spec import parse_mixture
from damex.engine.console import describe_experts, filter_console
from damex.engine.model_folder import CONFIG, META, write_model_folder
from damex.engine.rows import has_groups
from damex.engine.summary import markdown
from damex.errors import ConfigError, DataError, printable
from damex.files import atomic_folder, check_free, read_text, write_text
from damex.inference.stored import DetectorCheckpoint, last_change, millions
from damex.models.insertion import moe_blocks
from damex.workbench.growth.prune import kept_config, kept_notes

README, PICTURE, SUMMARY = "README.md", "detections.png", "summary.json"
BACKBONE = ("type", "name", "arch", "depth", "model_type")  # what tells backbones apart
NOT_GIVEN = "not given"
SCORES = ("mean_ap", "mean_ap50", "pooled_ap", "pooled_ap50", "datasets")
# What anybody can do with the files; run as it stands by a test.
PLAIN = """\
import json

from safetensors.torch import load_file

with open("config.json") as file:
    classes = json.load(file)["label_space"]["classes"]
weights = load_file("model.safetensors")
print(len(classes), "classes, such as", classes[0])
for name, tensor in weights.items():
    print(name, tuple(tensor.shape), tensor.dtype)
"""


def card(
    checkpoint: str,
    *,
    out: str,
    license_text: str | None,
    data_licenses: Sequence[str],
    trust: bool,
) -> None:
    """Write the folder; options as in the command's help."""
    filter_console()
    licenses = {}
    for word in data_licenses:
        name, found, text = word.partition("=")
        if not found:
            raise ConfigError(
                f"--data-license takes NAME=TEXT, as in fish='CC BY 4.0'; got {word!r}."
            )
        licenses[name] = text
    stored = DetectorCheckpoint.read(checkpoint, trust=trust)
    notes = write_card(stored, Path(out), license_text, licenses)
    print(printable("\n".join([f"written: {out}", *notes])))


def write_card(
    stored: DetectorCheckpoint,
    out: Path,
    license_text: str | None,
    licenses: Mapping[str, str],
) -> list[str]:
    """Write a model and its card into a new folder, and return notes for the user.

    As `damex.Detector.card`, which has the errors, too. Scores and the picture are
    those of the run that the checkpoint lies in; a damaged ``summary.json`` is a
    DataError.
    """
    check_free(out)
    for name in licenses:
        stored.space.dataset_id(name)
    config = kept_config(stored, stored.space)
    run = Run.of(stored)
    meta = {key: stored.meta[key] for key in META if key in stored.meta}
    space = stored.space.to_metainfo()
    with atomic_folder(out) as draft:
        write_model_folder(
            draft, stored.state, config=config, label_space=space, **meta
        )
        if run.picture is not None:
            shutil.copyfile(run.picture, draft / PICTURE)
        text = readme(stored, run, out.resolve().name, license_text, licenses)
        write_text(draft / README, text)
    shown = f", and {PICTURE} shows images of the data" if run.picture else ""
    return [
        *(f"note: {note}" for note in kept_notes(stored)),
        *([f"note: the card has no AP: {run.problem}"] if run.problem else []),
        f"before you publish it: {README} and {CONFIG} name the folders of the data "
        f"and the command of the training{shown}",
        f"try it: {shlex.join(['damex', 'predict', str(out), 'IMAGE'])}",
    ]


class Run(NamedTuple):
    """The training of a checkpoint, read from the files next to it."""

    summary: Mapping[str, Any]  # its scores are of these weights
    picture: Path | None = None  # of detections, by these weights
    problem: str | None = None  # why there are no scores

    @classmethod
    def of(cls, stored: DetectorCheckpoint) -> Run:
        """Read the files; scores that the checkpoint itself has come first."""
        path = Path(stored.path).expanduser()
        folder = path if path.is_dir() else path.parent
        summary, picture = _summary_in(folder / SUMMARY), folder / PICTURE
        now, then = stored.meta.get("iter"), summary.get("iterations")
        problem = None
        if last_change(stored.path) != stored.changed:
            summary, problem = {}, "its file has changed since it was loaded"
        elif then is None:
            summary = {}
            problem = f"there is no {SUMMARY} of a training next to the checkpoint"
        elif now is None:  # written by damex prune or grow
            summary = {}
            problem = "the checkpoint was not written by a training"
        elif now != then:
            summary = {key: one for key, one in summary.items() if key not in SCORES}
            problem = f"the last evaluation of the run was of iteration {then}, and "
            problem += f"these are the weights of iteration {now}"
        elif "mean_ap" not in summary:
            problem = "the run was not evaluated"
        # A stranger's link may lead to files that must not be published.
        is_shown = problem is None and picture.is_file() and not picture.is_symlink()
        return cls(
            {**summary, **stored.scores},
            picture if is_shown else None,
            None if stored.scores else problem,
        )


def _summary_in(file: Path) -> dict[str, Any]:
    """Content of a ``summary.json``; empty if it is missing."""
    if not file.is_file():
        return {}
    try:
        return {**json.loads(read_text(file))}
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{file} is not the summary of a training ({error}); remove it, or move "
            "the checkpoint to a folder of its own."
        ) from error


def readme(
    stored: DetectorCheckpoint,
    run: Run,
    name: str,
    license_text: str | None,
    licenses: Mapping[str, str],
) -> str:
    """The model card in Markdown, where texts of the checkpoint are shown as they are.

    ``name`` is that of the folder.
    """
    parts = [
        f"# {plain(name)}",
        _about(stored, license_text),
        *([f"![Annotated and detected objects]({PICTURE})"] if run.picture else []),
        f"## Use\n\n{_use(stored)}",
        f"## Datasets\n\n{_datasets(stored, run, licenses)}",
        f"## Experts\n\n{_experts(stored)}",
        f"## Average precision\n\n{_scores(stored, run)}",
        f"## Training\n\n{_training(stored, run)}",
        f"## Limits\n\n{_limits(run)}",
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def plain(value: Any) -> str:
    """Text on one line that Markdown and HTML show as it is."""
    line = printable(" ".join(str(value).split()))
    return re.sub(r"([\\`*_{}\[\]<>#|~&$!@])", r"\\\1", line)


def _about(stored: DetectorCheckpoint, license_text: str | None) -> str:
    space, model = stored.space, stored.model
    config = model.get("config")  # of a detector of Transformers
    config = config if isinstance(config, Mapping) else {}
    backbone = model.get("backbone") or config.get("backbone_config") or {}
    words = [backbone[key] for key in BACKBONE if key in backbone]
    kinds = [model.get("type"), config.get("model_type")]
    return _lines(
        {
            "detector": " ".join(map(str, filter(None, kinds))),
            "backbone": " ".join(map(str, words)) or None,
            "parameters": f"{millions(stored.state)} million",
            "datasets": len(space.dataset_names),
            "classes": space.num_classes,
            "license of the weights": license_text,
            "written by": f"damex {__version__}",
        }
    )


def _lines(rows: Mapping[str, Any]) -> str:
    found = {key: NOT_GIVEN if one is None else one for key, one in rows.items()}
    return "\n".join(f"- {key}: {plain(value)}" for key, value in found.items())


def _use(stored: DetectorCheckpoint) -> str:
    trust = ""
    if stored.trust:
        trust = (
            "The detector has classes of its own: loading it takes `--trust` (in "
            "Python `trust=True`), and runs code of whoever made them.\n\n"
        )
    return (
        "With damex, where FOLDER is this folder:\n\n"
        "```bash\ndamex predict FOLDER photo.jpg\n```\n\n"
        "```python\nimport damex\n\n"
        'detector = damex.load("FOLDER")\n'
        'for prediction in detector.predict("photo.jpg"):\n'
        "    print(prediction.names, prediction.scores, prediction.boxes)\n```\n\n"
        f"{trust}"
        "No file here is code. Without damex, weights and classes are read by "
        f"safetensors and json alone, in this folder:\n\n```python\n{PLAIN}```"
    )


def _datasets(stored: DetectorCheckpoint, run: Run, licenses: Mapping[str, str]) -> str:
    space, rows, lines = stored.space, [], []
    for number, name in enumerate(space.dataset_names):
        own = [space.classes[label] for label in space.valid_labels(number)]
        images = _images_for_training(stored, name), _row_of(run, name).get("images")
        counts = (NOT_GIVEN if count is None else count for count in images)
        rows.append((plain(name), *map(plain, counts), str(len(own))))
        shown = ", ".join(map(plain, own))
        license_text = plain(licenses.get(name) or NOT_GIVEN)
        lines.append(f"- **{plain(name)}** (license: {license_text}): {shown}")
    header = ("dataset", "training images", "validation images", "classes")
    return f"{markdown(header, rows)}\n" + "\n".join(lines)


def _images_for_training(stored: DetectorCheckpoint, name: str) -> int | None:
    """Number of images in the COCO file, if it lies where the training found it."""
    try:
        specs = {spec.name: spec for spec in parse_mixture(stored.mixture)}
        source = specs[name].coco_source("train") if name in specs else None
        return source and len(read_coco(source.annotations, name)["images"])
    except (ConfigError, DataError):
        return None


def _experts(stored: DetectorCheckpoint) -> str:
    detector = stored.build()
    words = describe_experts(detector)
    first = "None: the detector is dense." if words == "dense" else f"{words}."
    block = next(filter(has_groups, moe_blocks(detector)), None)
    if block is None or block.moe.group_experts_GE is None:
        return plain(first)
    groups, experts_GE = stored.space.group_names, block.moe.group_experts_GE
    rows = [
        (plain(group), ", ".join(map(str, own_E.nonzero().flatten().tolist())))
        for group, own_E in zip(groups, experts_GE, strict=True)
    ]
    return (
        f"{plain(first)} Each dataset was taught to use its own:\n\n"
        f"{markdown(('datasets', 'experts'), rows)}"
    )


def _scores(stored: DetectorCheckpoint, run: Run) -> str:
    if run.problem is not None:
        return f"{NOT_GIVEN.capitalize()}: {plain(run.problem)}."
    found = {plain(n): _row_of(run, n) for n in stored.space.dataset_names}
    for name in ("mean", "pooled"):
        keys = dict(ap=f"{name}_ap", ap50=f"{name}_ap50")
        found[f"*{name}*"] = {key: run.summary.get(k) for key, k in keys.items()}
    rows = [
        (name, _score(row.get("ap")), _score(row.get("ap50")))
        for name, row in found.items()
    ]
    return (
        "COCO AP at IoU 0.5 to 0.95, and AP50, in [0, 1], on the validation images of "
        f"each dataset:\n\n{markdown(('dataset', 'AP', 'AP50'), rows)}\n"
        "*mean*: of the datasets. *pooled*: over all images and classes as one dataset."
    )


def _row_of(run: Run, name: str) -> Mapping[str, Any]:
    rows = run.summary.get("datasets")
    row = rows.get(name) if isinstance(rows, dict) else None
    return row if isinstance(row, dict) else {}


def _score(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _training(stored: DetectorCheckpoint, run: Run) -> str:
    meta, summary = stored.meta, run.summary
    versions = summary.get("versions")
    known = versions.items() if isinstance(versions, dict) else ()
    lines = _lines(
        {
            "seed": meta.get("seed"),
            "epochs": meta.get("epoch"),
            "iterations": meta.get("iter"),
            "device": summary.get("device"),
            "versions": ", ".join(f"{one} {number}" for one, number in known) or None,
        }
    )
    if "command" not in summary:
        return f"{lines}\n- command: {NOT_GIVEN}"
    first, *rest = printable(str(summary["command"])).split() or [NOT_GIVEN]
    if Path(first).name in ("__main__.py", "damex"):
        first = "damex"  # not its install path
    return f"{lines}\n\nCommand:\n\n    {' '.join([first, *rest])}"


def _limits(run: Run) -> str:
    device = run.summary.get("device")
    where = NOT_GIVEN if device is None else plain(device)
    return (
        f"- Device of the training: {where}. Another device computes with other "
        "rounding.\n"
        "- AP is of the datasets' own validation images, and of one training: other "
        "images and other seeds give another.\n"
        "- Only the classes above are found, and as these datasets label them.\n"
        "- Anything not given above is unknown."
    )
