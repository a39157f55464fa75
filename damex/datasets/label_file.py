"""LabelFile: a JSON file that maps the classes of each dataset to the mixture's.

::

    {
      "version": 1,
      "unlisted": "union",
      "datasets": {
        "voc": {"motorbike": "motorcycle"},
        "zoo": {"jaguar": "zoo/jaguar", "do not use": null}
      }
    }

JSON, because YAML does not read the class names no, on and 7 as strings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from damex.errors import ConfigError, did_you_mean

VERSION = 1
UNLISTED = ("union", "partitioned", "drop", "error")
KEYS = ("version", "unlisted", "datasets")


@dataclass(frozen=True)
class LabelFile:
    """A user's mapping of classes to those of the mixture.

    Args:
        datasets: Per dataset: its class name -> name in the mixture, or None to leave
            it out. Equal names in the mixture are one class.
        unlisted: Rule for other classes: ``union`` keeps the name (after ``rename``),
            so that equal names are one class; ``partitioned`` makes it
            ``dataset/class``; ``drop`` leaves it out; ``error`` rejects it.
        where: File or option, for messages.
    """

    datasets: Mapping[str, Mapping[str, str | None]]
    unlisted: str = "union"
    where: str = "label_space"

    @classmethod
    def read(cls, path: str | Path) -> LabelFile:
        """Read a file; ConfigError if it is missing or invalid."""
        try:
            text = Path(os.path.expanduser(path)).read_bytes()  # noqa: PTH111 - Path raises
        except OSError as error:
            raise ConfigError(
                f"label_space: {path} cannot be read (seen from {Path.cwd()}): "
                f"{error.strerror}. damex data labels CONFIG --out {path} writes "
                "one to begin with."
            ) from error
        try:
            content = json.loads(text, object_pairs_hook=_without_doubles)
        except ValueError as error:
            raise ConfigError(f"label_space: {path}: {error}") from error
        return cls.from_content(content, where=str(path))

    @classmethod
    def from_content(cls, content: Any, *, where: str = "label_space") -> LabelFile:
        """Build from a parsed file called ``where``; ConfigError if it is invalid."""
        if not isinstance(content, Mapping):
            raise ConfigError(
                f'{where} must hold {{"version": {VERSION}, "datasets": {{...}}}}, got '
                f"{content!r}."
            )
        for key in content:
            if key not in KEYS:
                raise ConfigError(
                    f"{where} has the unknown key {key!r}; {did_you_mean(key, KEYS)}"
                )
        if content.get("version") != VERSION:
            raise ConfigError(
                f"{where}: version must be {VERSION}, got {content.get('version')!r}."
            )
        unlisted = content.get("unlisted", "union")
        if unlisted not in UNLISTED:
            raise ConfigError(
                f"{where}: unlisted must be one of {UNLISTED}, got {unlisted!r}."
            )
        datasets = content.get("datasets")
        if not isinstance(datasets, Mapping):
            raise ConfigError(
                f'{where}: datasets must be {{"<dataset>": {{"<its class>": "<class of '
                f'the mixture>"}}}}, got {datasets!r}.'
            )
        for name, classes in datasets.items():
            _check_classes(classes, f"{where}: dataset {name!r}")
        return cls(
            {name: dict(classes) for name, classes in datasets.items()}, unlisted, where
        )

    def to_content(self) -> dict[str, Any]:
        """Plain values for :meth:`from_content`."""
        return dict(
            version=VERSION,
            unlisted=self.unlisted,
            datasets={name: dict(classes) for name, classes in self.datasets.items()},
        )

    def to_text(self) -> str:
        """The file, one line per class."""
        rows = [
            f"    {json.dumps(name)}: {{\n"
            + ",\n".join(
                f"      {json.dumps(own, ensure_ascii=False)}: "
                f"{json.dumps(target, ensure_ascii=False)}"
                for own, target in classes.items()
            )
            + "\n    }"
            for name, classes in self.datasets.items()
        ]
        return (
            f'{{\n  "version": {VERSION},\n  "unlisted": {json.dumps(self.unlisted)},\n'
            f'  "datasets": {{\n' + ",\n".join(rows) + "\n  }\n}\n"
        )

    def check_datasets(self, names: Sequence[str]) -> None:
        """Reject datasets that the mixture does not have (ConfigError)."""
        for name in self.datasets:
            if name not in names:
                raise ConfigError(
                    f"{self.where} lists the dataset {name!r}; "
                    f"{did_you_mean(name, names).replace('it has', 'the mixture has')}"
                )

    def only(self, *datasets: str) -> LabelFile:
        """The label file restricted to some datasets."""
        found = {name: row for name, row in self.datasets.items() if name in datasets}
        return replace(self, datasets=found)

    def dropped(self, dataset: str) -> tuple[str, ...]:
        """Names of a dataset's classes that the file leaves out."""
        listed = self.datasets.get(dataset, {})
        return tuple(own for own, target in listed.items() if target is None)

    def mapping(
        self, dataset: str, own: Sequence[str], renamed: Mapping[str, str]
    ) -> dict[str, str]:
        """Map the class names ``own`` of a dataset to the mixture, except dropped ones.

        ``renamed`` is the ``rename`` of its entry.

        Raises:
            ConfigError: If a listed class is unknown or renamed, an unlisted one is an
                error, or no class stays.
        """
        listed = self.datasets.get(dataset, {})
        for name in listed:
            if name not in own:
                raise ConfigError(
                    f"{self.where}: dataset {dataset!r} has no class {name!r}; "
                    f"{did_you_mean(name, own)}"
                )
            if name in renamed:
                raise ConfigError(
                    f"{self.where} lists the class {name!r} of dataset {dataset!r}, "
                    "which 'rename' of its mixture entry changes, too; keep one of "
                    "them."
                )
        found = {name: self._target(dataset, name, renamed) for name in own}
        kept = {name: target for name, target in found.items() if target is not None}
        if not kept:
            raise ConfigError(
                f"{self.where} leaves no class of dataset {dataset!r}; keep one, or "
                "remove the dataset from the mixture."
            )
        return kept

    def _target(
        self, dataset: str, name: str, renamed: Mapping[str, str]
    ) -> str | None:
        listed = self.datasets.get(dataset, {})
        if name in listed:
            return listed[name]
        if self.unlisted == "error":
            raise ConfigError(
                f"{self.where} does not list the class {name!r} of dataset "
                f"{dataset!r}; add it (null leaves a class out), or set "
                '"unlisted": "union".'
            )
        if self.unlisted == "drop":
            return None
        target = renamed.get(name, name)
        return f"{dataset}/{target}" if self.unlisted == "partitioned" else target


def _check_classes(classes: Any, where: str) -> None:
    if not isinstance(classes, Mapping):
        raise ConfigError(
            f'{where} must be {{"<its class>": "<class of the mixture>"}}, got '
            f"{classes!r}."
        )
    for own, target in classes.items():
        if target is not None and not (isinstance(target, str) and target.strip()):
            raise ConfigError(
                f"{where}: class {own!r} must become a name, or null to leave it out; "
                f"got {target!r}."
            )


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError for a repeated key (JSON keeps the last one)."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands twice in one object; remove one of them.")
        found[key] = value
    return found
