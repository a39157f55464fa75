"""Missing labels of real images: what to teach of classes that are not labeled.

    python -m studies.completing data/halves --seeds 1 2 3 4 5

Trains every arm on halves of a dataset (``studies.split_labels``), all for the same
number of iterations: the teacher's count, except those of `SPECIALISTS`. AP is over all
classes of fully labeled validation images, the dataset not given. Finished runs are
skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from damex.errors import ConfigError
from damex.workbench.api import run_damex
from damex.workbench.cli.run import Device, Jobs, Seeds, program, run_command
from damex.workbench.complete.teacher import right_ones

CONFIG = "configs/real/missing_labels.py"
Options = Mapping[str, str]
# Options of trainings that take no second step.
ARMS: Mapping[str, Options] = MappingProxyType(
    {
        "negatives": {},
        "ignored": {"model.ignore_unannotated_classes": "True"},
        "ignored_if_found": {"model.ignore_unannotated_classes": "0.15"},
    }
)


class Lesson(NamedTuple):
    """An arm that is completed after half of the time: its first and second half.

    With ``min_score``, all detections from there on become labels, right or wrong.
    Without ``completes``, none do: a control for the second half's new schedule of
    the learning rate. The second half starts from the teacher's weights, unless
    ``anew``.
    """

    teacher: str
    then: str = "negatives"
    min_score: float | None = None
    completes: bool = True
    anew: bool = False

    @property
    def folder(self) -> str:
        """Name of the folder of completed datasets, beside the teacher."""
        return "completed" + ("" if self.min_score is None else f"_{self.min_score}")


LESSONS: Mapping[str, Lesson] = MappingProxyType(
    {
        "completed": Lesson("negatives"),
        "completed_from_ignored": Lesson("ignored"),
        "completed_from_ignored_if_found": Lesson("ignored_if_found"),
        "completed_and_ignored_if_found": Lesson(
            "ignored_if_found", "ignored_if_found"
        ),
        "completed_wrongly": Lesson("negatives", min_score=0.05),
        "ignored_if_found_twice": Lesson(
            "ignored_if_found", "ignored_if_found", completes=False
        ),
        "completed_anew": Lesson("ignored_if_found", "ignored_if_found", anew=True),
    }
)
# A detector of each half, half of the time each, completes the other one; then one of
# both trains anew for the whole time, and ignores what it finds: twice the time.
SPECIALISTS = "completed_from_specialists"
app = program(
    "python -m studies.completing",
    "Compare what is taught of classes that a dataset does not label.",
    "python -m studies.completing data/halves --seeds 1 2 3",
)


class Job(NamedTuple):
    """One training of an arm."""

    arm: str
    seed: int


@app.default
def completing(
    halves: Path,
    /,
    *,
    seeds: Seeds = (1, 2, 3, 4, 5),
    arms: tuple[str, ...] = (*ARMS, *LESSONS, SPECIALISTS, "all_labels"),
    moe: str = "dense",
    group: str | None = None,
    epochs: int = 2,
    work_dir: Path = Path("work_dirs/missing_labels"),
    jobs: Jobs = 2,
    device: Device = None,
) -> None:
    """Train all arms, seed by seed, and print their scores.

    Args:
        halves: Folder with the halves; those with all labels in its folder all_labels.
        seeds: Random seeds, one training of each arm for each.
        arms: What to compare.
        moe: Mixture of experts, by the name of its config.
        group: Group of both halves, which then share experts; default: one each.
        epochs: Length of an arm, in epochs of 300 iterations; an even number.
        work_dir: Folder of the runs.
        jobs: Trainings at a time.
        device: Of all trainings; default: a GPU if there is one.
    """
    names = [folder.name for folder in sorted(halves.iterdir()) if folder.is_dir()]
    names = [name for name in names if name.endswith(("_a", "_b"))]
    if epochs % 2:
        raise ConfigError(f"--epochs must be even, for two halves, got {epochs}.")
    given = () if device is None else ("--device", device)
    lessons = [LESSONS[arm] for arm in arms if arm in LESSONS]
    folder = work_dir / "-".join([moe, *([group] if group else []), str(epochs)])
    study = Study(halves, names, moe, group, epochs, lessons, folder, given)
    every = [Job(arm, seed) for seed in seeds for arm in arms]
    teachers = dict.fromkeys(
        Job(one.teacher, seed) for seed in seeds for one in lessons
    )
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(study.teach, teachers))  # first, as arms share them
            for job, scores in zip(every, pool.map(study.run, every), strict=True):
                text = "{:.3f} {}".format(*scores)
                print(f"{job.arm} seed {job.seed}: mean AP {text}", flush=True)
        except BaseException:  # Ctrl-C, too: what has not started does not start
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True)
class Study:
    """What all trainings share; ``names`` are the folders of the halves."""

    halves: Path
    names: Sequence[str]
    moe: str
    group: str | None
    epochs: int
    lessons: Sequence[Lesson]
    work_dir: Path
    device: Sequence[str]

    def teach(self, job: Job) -> None:
        """Train a teacher for half of the time, and write the labels that it finds."""
        name, epochs = f"teacher_{job.arm}", self.epochs // 2
        options, halves = ARMS[job.arm], self._folders(self.halves)
        teacher = self._train(name, job.seed, halves, epochs, options)
        for lesson in self.lessons:
            if lesson.teacher == job.arm and lesson.completes:
                at_once = lesson.min_score
                words = [] if at_once is None else ["--min-score", str(at_once)]
                self._complete(teacher, epochs, teacher / lesson.folder, words)

    def run(self, job: Job) -> tuple[float, dict[str, float]]:
        """Run one arm with one seed; its mean AP, and that of each half."""
        options, epochs = ARMS.get(job.arm, {}), self.epochs
        folders = self._folders(self.halves)
        if job.arm == "all_labels":
            folders = self._folders(self.halves / "all_labels")
        if job.arm == SPECIALISTS:
            folders, options = self._specialise(job.seed), ARMS["ignored_if_found"]
        if job.arm in LESSONS:
            lesson, epochs = LESSONS[job.arm], epochs // 2
            teacher = self.work_dir / f"teacher_{lesson.teacher}" / f"seed{job.seed}"
            if lesson.completes:
                folders = self._folders(teacher / lesson.folder)
            options = ARMS[lesson.then]
            if not lesson.anew:
                last = teacher / f"epoch_{epochs}.pth"
                options = {**options, "load_from": str(last)}
        return _scores(self._train(job.arm, job.seed, folders, epochs, options))

    def _folders(self, source: Path) -> dict[str, Path]:
        return {name: source / name for name in self.names}

    def _specialise(self, seed: int) -> dict[str, Path]:
        """Train a detector on each half, and let it complete the other; the folders."""
        epochs, folders = self.epochs // 2, {}
        for name, other in zip(self.names, reversed(self.names), strict=True):
            half, missing = self.halves / name, self.halves / other
            trained = self._train(f"only_{name}", seed, {name: half}, epochs, {})
            done = trained / "completed"
            self._complete(trained, epochs, done, ["--data", str(missing)])
            folders[other] = done / other
        return folders

    def _complete(
        self, teacher: Path, epochs: int, done: Path, words: Sequence[str]
    ) -> None:
        if not done.exists():
            checkpoint = str(teacher / f"epoch_{epochs}.pth")
            words = ["complete", checkpoint, *self.device, *words, "--out", str(done)]
            run_damex(["data", *words], verbose=False)

    def _train(
        self,
        arm: str,
        seed: int,
        folders: Mapping[str, Path],
        epochs: int,
        options: Options,
    ) -> Path:
        """Train unless it is done; returns the folder of the run."""
        folder = self.work_dir / arm / f"seed{seed}"
        if not (folder / "summary.json").exists():
            group = {"group": self.group} if self.group else {}
            entries = [
                {"name": name, "root": str(root), "weight": 1.0, **group}
                for name, root in folders.items()
            ]
            settings = {"moe": self.moe, "max_epochs": epochs, "randomness.seed": seed}
            settings |= {"mixture": json.dumps(entries), **options}
            words = [f"{key}={value}" for key, value in settings.items()]
            run = ("--work-dir", str(folder), "--cfg-options", *words)
            run_damex(["train", CONFIG, *self.device, *run], verbose=False)
        return folder


@app.command
def quality(completed: Path, truth: Path, /) -> None:
    """Print how many of the written labels are right, and of the missing ones found.

    Args:
        completed: Folder of completed datasets.
        truth: Folder of the same datasets with all labels.
    """
    paths = sorted(completed.glob("*/train.json"))
    if not paths:
        raise ConfigError(f"{completed} has no completed datasets, */train.json.")
    print(f"{'':28} labels  ignored  missing  right  found  found or ignored")
    for path in paths:
        folder, document = path.parent, json.loads(path.read_text())
        whole = json.loads((truth / folder.name / "train.json").read_text())
        names = {one["id"]: one["name"] for one in document["categories"]}
        for name in [c["name"] for c in document["categories"] if c.get("predicted")]:
            finds = _boxes(document, name, names, predicted=True)
            objects = _boxes(
                whole, name, {c["id"]: c["name"] for c in whole["categories"]}
            )
            found = _matched([one for one in finds if not one.is_crowd], objects)
            covered = _matched(finds, objects)
            sure = sum(not one.is_crowd for one in finds)
            rates = [found / max(sure, 1)]
            rates += [count / max(len(objects), 1) for count in (found, covered)]
            numbers = f"{sure:6} {len(finds) - sure:8} {len(objects):8}"
            shares = " ".join(f"{rate:6.0%}" for rate in rates)
            print(f"{folder.name + ' ' + name:28} {numbers} {shares}")


class Box(NamedTuple):
    """A box of a class in an image: corners in pixels."""

    image: str
    corners: tuple[float, float, float, float]
    is_crowd: bool
    score: float


def _boxes(
    document: Any, name: str, names: Mapping[Any, str], *, predicted: bool = False
) -> list[Box]:
    """Boxes of a class, best first."""
    files = {one["id"]: Path(one["file_name"]).name for one in document["images"]}
    found = []
    for row in document["annotations"]:
        if (
            names[row["category_id"]] == name
            and row.get("predicted", False) == predicted
        ):
            x, y, w, h = row["bbox"]
            corners, score = (x, y, x + w, y + h), row.get("score", 1.0)
            crowd = bool(row.get("iscrowd"))
            found.append(Box(files[row["image_id"]], corners, crowd, score))
    return sorted(found, key=lambda one: -one.score)


def _matched(boxes: Sequence[Box], objects: Sequence[Box]) -> int:
    """Number of objects that are found."""
    count = 0
    for image in {one.image for one in objects}:
        both = (
            [one.corners for one in rows if one.image == image]
            for rows in (boxes, objects)
        )
        found, truth = (torch.tensor(one).double().view(-1, 4) for one in both)
        count += int(right_ones(found, truth).sum())
    return count


def _scores(folder: Path) -> tuple[float, dict[str, float]]:
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    each = {name: row["ap"] for name, row in summary["datasets"].items()}
    return summary["mean_ap"], each


if __name__ == "__main__":
    sys.exit(run_command(app))
