"""TrainingRun: one training as a process of its own, with its files in one folder."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damex.errors import ConfigError, DataError

__all__ = ["TrainingRun"]

TRAIN = Path(__file__).parents[2] / "tools" / "train.py"


@dataclass(frozen=True)
class TrainingRun:
    """One call of ``tools/train.py``; finished when its folder has a summary.

    Attributes:
        config: Config file.
        folder: Work directory of the run.
        options: ``key=value`` overrides of the config.
        is_scored: Whether it has not finished without an evaluation.
    """

    config: str
    folder: Path
    options: tuple[str, ...]
    is_scored: bool = False

    @property
    def log(self) -> Path:
        """The file that holds what the run wrote to the screen."""
        return self.folder / "screen.log"

    def summary(self) -> dict[str, Any] | None:
        """What the finished run measured; None if it has not finished.

        Raises:
            ConfigError: If the folder holds a run with other settings.
            DataError: If the summary is no JSON.
        """
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} is no JSON ({error}); delete the folder to run it again."
            ) from error
        found = _settings(shlex.split(summary.get("command", "")))
        if found != (self.config, frozenset(self.options)):
            raise ConfigError(
                f"{path} belongs to a run with other settings: {summary['command']}. "
                "Name another --work-dir, or delete that folder."
            )
        return None if self.is_scored and not summary["datasets"] else summary

    def start(self, *, threads: int) -> subprocess.Popen[bytes]:
        """Start it, or go on from its last checkpoint.

        Args:
            threads: Threads for the computation.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if (self.folder / "last_checkpoint").is_file() else []
        command = [
            *[sys.executable, str(TRAIN), self.config, *resume],
            *["--work-dir", str(self.folder), "--cfg-options", *self.options],
        ]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def last_words(self) -> str:
        """The last line of the log that is not empty, for instance its error."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


def _settings(command: list[str]) -> tuple[str, frozenset[str]]:
    """Config and overrides in a recorded command, wherever its results were put."""
    if "--cfg-options" not in command or len(command) < 2:
        return "", frozenset()
    cut = command.index("--cfg-options")
    return command[1], frozenset(command[cut + 1 :])
