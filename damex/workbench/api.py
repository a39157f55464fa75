"""Train, predict, evaluate and export from Python: ``damex.train`` and ``damex.load``.

::

    import damex
    run = damex.train({"fish": "data/fish", "boards": "data/boards"}, epochs=4)
    detector = damex.load(run.checkpoint)
    for prediction in detector.predict("photos/"):
        print(prediction.path, prediction.names, prediction.scores)
    print(detector.evaluate("data/fish"))
    detector.export("fish.onnx", dataset="fish")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from logging import WARNING, StreamHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from damex.datasets.entries import entry_of_folder
from damex.errors import ConfigError
from damex.options import option_of
from damex.workbench.zero_config import folder_name, named_folders, run_name

if TYPE_CHECKING:
    from damex.inference.media import Picture
    from damex.inference.predictor import Prediction, Tile

Data = str | os.PathLike | Sequence[str | os.PathLike] | Mapping[str, str | os.PathLike]


@dataclass(frozen=True)
class Evaluation:
    """Average precision per dataset, in [0, 1].

    Attributes:
        mean_ap: Mean over datasets of COCO AP.
        mean_ap50: Mean over datasets of AP at IoU 0.5.
        pooled_ap: AP over all images and classes as one dataset; the dataset of an
            image is not given.
        datasets: ``ap``, ``ap50``, ``images`` and ``boxes`` of each dataset.
        classes: AP of each class, by dataset; with ``classwise``.
        confusion: Number of images of each dataset by the dataset group whose experts
            most of their tokens went to; with ``classwise``.
        summary: All scores, as in ``summary.json``.
    """

    mean_ap: float | None
    mean_ap50: float | None
    pooled_ap: float | None
    datasets: Mapping[str, Mapping[str, Any]]
    classes: Mapping[str, Mapping[str, float | None]]
    confusion: Mapping[str, Mapping[str, int]]
    summary: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Evaluation:
        """Return the scores of a ``summary.json``."""
        found: dict[str, Any] = dict.fromkeys(("mean_ap", "mean_ap50", "pooled_ap"))
        found |= dict(datasets={}, classes={}, confusion={})
        found |= {key: summary[key] for key in found if key in summary}
        return cls(**found, summary=summary)

    def __str__(self) -> str:
        rows = [(name, row["ap"], row["ap50"]) for name, row in self.datasets.items()]
        rows.append(("mean", self.mean_ap, self.mean_ap50))
        width = max(len("dataset"), *(len(name) for name, *_ in rows))
        lines = [f"{'dataset':{width}}     AP   AP50"]
        for name, *scores in rows:
            shown = ("-" if score is None else f"{score:.3f}" for score in scores)
            lines.append(f"{name:{width}} {' '.join(f'{one:>6}' for one in shown)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class TrainedRun:
    """A finished training.

    Attributes:
        work_dir: Folder of the run.
        config: The complete config; ``tools/train.py CONFIG`` repeats the training.
        checkpoint: The checkpoint with the best mean AP, else the last one; None if the
            config saves none.
        evaluation: Scores of the last evaluation.
    """

    work_dir: Path
    config: Path
    checkpoint: Path | None
    evaluation: Evaluation

    def __str__(self) -> str:
        return f"{self.evaluation}\ncheckpoint: {self.checkpoint}"


def train(
    data: Data,
    *,
    model: str | None = None,
    tile: int | str | Mapping[str, int | str] | None = None,
    epochs: int | None = None,
    work_dir: str | os.PathLike | None = None,
    device: str | None = None,
    amp: bool = False,
    resume: bool = False,
    complete: bool = False,
    options: Mapping[str, Any] | None = None,
    verbose: bool = True,
) -> TrainedRun:
    """Train a detector on one or several datasets, in a process of its own.

    The logging, warnings and random state of the calling program stay as they are.

    Args:
        data: Folder of each dataset by name; or folders, whose names are taken; or the
            path or name of a config.
        model: A detector that comes with damex (``damex train --help``); ``tiny`` by
            default. Not with a config.
        tile: Side of the windows through which all datasets, or those named, are seen,
            in pixels of their images; ``auto`` chooses from the sizes of the boxes.
        epochs: Length of the training; by default that of the config.
        work_dir: Folder for logs and checkpoints; by default that of the config, else
            one below ``work_dirs``.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU if available.
        amp: Mixed precision, on a GPU.
        resume: Continue from the last checkpoint of the work dir.
        complete: Write the labels that one dataset lacks and another has, after half of
            the epochs, and train on.
        options: Settings of the config to change: ``{"moe.gate.k": 2}``. Values are
            numbers, texts, True, False, None, and lists, tuples and dicts of them.
        verbose: Print the output of the training.

    Raises:
        ConfigError: If the data or a setting cannot be used.
        RuntimeError: If the training fails.
    """
    options = dict(options or {})
    folder = work_dir or options.get("work_dir")
    if isinstance(data, str | os.PathLike) and not Path(data).expanduser().is_dir():
        words = ["train", os.fspath(data)]
        default = _work_dir_of(os.fspath(data), resumes=resume)
        folder = Path(folder or default)
    else:
        datasets = _data_words(data)
        words = ["train", "--data", *datasets]
        folder = Path(folder or f"work_dirs/{run_name(named_folders(datasets))}")
    words += ["--work-dir", str(folder)]
    for name, value in (("model", model), ("epochs", epochs), ("device", device)):
        words += [] if value is None else [f"--{name}", str(value)]
    if tile is not None:
        sides = tile.items() if isinstance(tile, Mapping) else [(None, tile)]
        words += ["--tile", *(f"{n}={v}" if n else f"{v}" for n, v in sides)]
    words += ["--amp"] * amp + ["--resume"] * resume + ["--complete"] * complete
    if options:
        words += ["--cfg-options", *(option_of(*row) for row in options.items())]
    run_damex(words, verbose=verbose)
    return _finished(folder)


def _work_dir_of(config: str, *, resumes: bool) -> str:
    """The folder that ``damex train CONFIG`` writes to."""
    with warnings.catch_warnings():  # mmengine adds filters
        from damex.config_files import find_config, read_part, work_dir_of

        try:
            find_config(config)
        except ConfigError as error:
            raise ConfigError(
                f"{config} is neither a folder nor a config. Name folders that exist, "
                f"as in damex.train({{'fish': 'data/fish'}}), or a config: {error}"
            ) from error
        return work_dir_of(read_part(config), resumes=resumes)


def _data_words(data: Any) -> list[str]:
    if not isinstance(data, Mapping):
        several = [data] if isinstance(data, str | os.PathLike) else data
        return [os.fspath(folder) for folder in several]
    for name in data:
        if not str(name) or {"=", "/"} & {*str(name)}:
            raise ConfigError(
                f"{name!r} cannot be the name of a dataset: it must not be empty or "
                "have a '=' or '/'."
            )
    return [f"{name}={os.fspath(folder)}" for name, folder in data.items()]


def run_damex(words: Sequence[str], *, verbose: bool) -> None:
    """Run damex, printing its lines as they come; its errors are raised here."""
    last, interrupts = deque[str](maxlen=30), list[int]()
    # Set in notebooks, these make a bar of control codes out of every line.
    forced = ("FORCE_COLOR", "TTY_COMPATIBLE")
    with subprocess.Popen(
        [sys.executable, "-m", "damex", *words],
        env={key: value for key, value in os.environ.items() if key not in forced},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:

        def show() -> None:
            for line in process.stdout or ():
                last.append(line.rstrip())
                if verbose:
                    print(line, end="", flush=True)

        def forward(number: int, _: object) -> None:
            interrupts.append(number)
            process.send_signal(number)

        # Interrupted, the command ends by itself and says how to continue.
        before = signal.getsignal(signal.SIGINT)
        if is_main := threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, forward)
        try:
            show()
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt(*[*last][-1:])
    if process.returncode == 0:
        return
    errors = [line for line in last if line.startswith("error: ")]
    if process.returncode == 2 and errors:
        raise ConfigError(errors[-1].removeprefix("error: "))
    raise RuntimeError(
        f"damex {words[0]} ended with status {process.returncode}; its last lines:\n"
        + "\n".join(last)
    )


def _finished(folder: Path) -> TrainedRun:
    """Files of a finished training, as its summary names them."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    name, config = summary["checkpoint"], folder / summary["config"]
    checkpoint = None if name is None else folder / name
    return TrainedRun(folder, config, checkpoint, Evaluation.of(summary))


def load(
    checkpoint: str | os.PathLike, *, device: str | None = None, trust: bool = False
) -> Detector:
    """Load a trained detector from a checkpoint alone; see `Detector`."""
    return Detector(checkpoint, device=device, trust=trust)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show warnings alone of mmengine's log, for a while."""
    from mmengine.logging import MMLogger

    handlers = MMLogger.get_current_instance().handlers
    screens = [one for one in handlers if type(one) is StreamHandler]
    with ExitStack() as stack:
        for one in screens:
            stack.callback(one.setLevel, one.level)
            one.setLevel(max(one.level, WARNING))
        yield


class Detector:
    """A trained detector.

    Untrusted checkpoints are safe: their content is read as data, and only classes in
    damex's allow-list are built from their config.

    Args:
        checkpoint: A .pth file of a training with damex, or a folder of its `card`.
        device: ``cpu`` or ``cuda:0``; by default a GPU if available.
        trust: Allow all classes and arguments in the config of the checkpoint, such as
            classes of your own, and import its ``custom_imports``.

    Attributes:
        classes: Names of the classes of all datasets.
        datasets: Class names by dataset.

    Raises:
        DataError: If the checkpoint cannot be read, or needs ``trust``.
        ConfigError: If damex did not train it on a mixture, or the device is missing.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike,
        *,
        device: str | None = None,
        trust: bool = False,
    ) -> None:
        from damex.inference.predictor import Predictor

        self.checkpoint = os.fspath(checkpoint)  # or the address of one
        with _quiet():
            self._predictor = Predictor(self.checkpoint, device=device, trust=trust)
        self.classes = self._predictor.classes
        self.datasets = self._predictor.datasets

    def predict(
        self,
        images: Picture | Iterable[Picture],
        *,
        dataset: str = "auto",
        min_score: float = 0.3,
        batch_size: int = 8,
        tile: Tile = "auto",
    ) -> Iterator[Prediction]:
        """Detect objects, one image at a time.

        Args:
            images: Files, folders (with all below them) or patterns, PIL images, or
                uint8 arrays (height, width, 3) in RGB; one or several. An iterator,
                such as the frames of a camera, is read a batch at a time.
            dataset: Whose classes to detect: ``auto`` (of the predicted dataset), the
                name of a dataset, whose experts then see all images, or ``all``.
            min_score: Minimum score of detections.
            batch_size: Images of one shape per forward pass.
            tile: Side of the windows to look through, in pixels of the image; None for
                whole images. ``auto``: that of the dataset in training.

        Raises:
            ConfigError: If the dataset is unknown.
            DataError: If there is no image, or one cannot be read.
        """
        from damex.inference.media import as_several
        from damex.workbench.cli.predict import find_images

        def found(one: Picture) -> Iterable[Picture]:
            if isinstance(one, str | os.PathLike):
                return find_images([os.fspath(one)], videos=True)
            return [one]

        several = as_several(images)
        pictures: Iterable[Picture] = (one for word in several for one in found(word))
        if isinstance(several, Sequence):  # report a missing file at once
            pictures = [*pictures]
        return self._predictor.stream(
            *(pictures, dataset, min_score, batch_size), tile=tile
        )

    def evaluate(
        self,
        data: str | os.PathLike | None = None,
        *,
        dataset: str | None = None,
        split: str = "val",
        batch_size: int = 8,
        classwise: bool = False,
    ) -> Evaluation:
        """Evaluate on the datasets of the training, or on a folder.

        Args:
            data: Folder of a dataset; by default all datasets of the training. Without
                splits, ``val`` is the tenth that a training would hold out.
            dataset: The dataset of the training that the folder belongs to, whose
                classes are scored; as in all evaluations, the router chooses the
                experts. By default the one of the folder's name, or the only one.
            split: ``val``, ``train`` or ``test``; a missing ``test`` is ``val``.
            batch_size: Images per forward pass.
            classwise: Whether to score each class, and to count for each dataset which
                dataset's experts its images went to.

        Raises:
            ConfigError: If the dataset is unknown, or unclear for a folder.
            DataError: If the data cannot be read.
        """
        entries = None
        if data is None and dataset is not None:
            raise ConfigError("dataset= is that of a folder; name the folder, too.")
        if data is not None:
            folder = Path(data).expanduser()
            if not folder.is_dir():
                raise ConfigError(f"{data} is not the folder of a dataset.")
            only = next(iter(self.datasets)) if len(self.datasets) == 1 else None
            name = dataset or only or folder_name(folder)
            if name not in self.datasets:
                raise ConfigError(
                    f"the detector knows no dataset {name!r}; set dataset= to one of "
                    f"{', '.join(self.datasets)}."
                )
            entries = [entry_of_folder(name, folder, self._predictor.stored.mixture)]
        with _quiet():
            found = self._predictor.evaluate(
                entries, split=split, batch_size=batch_size, classwise=classwise
            )
        return Evaluation.of(found)

    def complete(
        self,
        data: Data,
        out: str | os.PathLike,
        *,
        classes: Sequence[str] = (),
        min_score: float | None = None,
    ) -> Path:
        """Write the labels that datasets lack, found by this detector.

        Args:
            data: Folder of each dataset by name; or folders, whose names are taken.
            out: The new folder, with a folder for each dataset and ``index.html``.
            classes: Classes to look for; all by default.
            min_score: Score from which finds are labels; by default each class has its
                own, chosen on validation images.

        Raises:
            ConfigError: If nothing can be completed, or the folder exists.
            DataError: If the data cannot be read.
        """
        from damex.workbench.complete.complete import write_completed
        from damex.workbench.complete.teacher import DetectorTeacher

        teacher = DetectorTeacher(self._predictor, batch_size=8)
        folders = named_folders(_data_words(data))
        with _quiet():
            write_completed(
                *(teacher, folders, Path(out)),
                source=self.checkpoint,
                classes=classes,
                min_score=min_score,
            )
        return Path(out)

    def export(
        self,
        path: str | os.PathLike,
        *,
        dataset: str | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> Path:
        """Export to ONNX (.onnx), or that of one dataset to mmdet (.pth).

        A ``MoETransformersDetector`` goes to Transformers instead, as a folder.

        Args:
            path: The new file or folder; it must not exist.
            dataset: For a detector of one dataset; the whole mixture by default.
            image_size: Width and height to which the ONNX file, or the folder's image
                processor, resizes images; by default those of the config.

        Raises:
            ConfigError: If the detector cannot be exported, or the file exists.
        """
        from damex.workbench.export.export import write_export

        stored, out = self._predictor.stored, os.fspath(path)
        with _quiet():
            write_export(stored, out, dataset=dataset, image_size=image_size)
        return Path(path)

    def card(
        self,
        out: str | os.PathLike,
        *,
        license_text: str | None = None,
        data_licenses: Mapping[str, str] | None = None,
    ) -> Path:
        """Write a folder for others: safetensors, JSON, and a model card to read.

        `damex.load` and all commands take the folder in the place of a checkpoint.

        Args:
            out: The new folder.
            license_text: License of the weights, for the card.
            data_licenses: License of each dataset, for the card.

        Raises:
            ConfigError: If the folder holds something, a dataset is unknown, or the
                config has values that are not of JSON.
            DataError: If the config has more than damex accepts without ``trust``.
        """
        from damex.workbench.card import write_card

        with _quiet():
            stored = self._predictor.stored
            write_card(stored, Path(out), license_text, data_licenses or {})
        return Path(out)
