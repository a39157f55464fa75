"""LabelSpace: one list of classes for all datasets of a mixture, mapped by name.

A label file maps the classes of each dataset to the mixture's::

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError, DataError, check_known, did_you_mean
from damex.files import read_text

LABEL_SPACE_MODES = ("union", "partitioned")
VERSION = 1
UNLISTED = (*LABEL_SPACE_MODES, "drop", "error")
KEYS = ("version", "unlisted", "datasets")
FORM = (
    f'{{"version": {VERSION}, "datasets": '
    '{"<dataset>": {"<its class>": "<class of the mixture, or null>"}}}'
)


def read_label_space(value: Any) -> str | LabelFile:
    """Read ``label_space``: a mode, a label file or its content; else ConfigError."""
    if isinstance(value, Mapping):
        return LabelFile.from_content(value)
    if isinstance(value, str) and value.endswith(".json"):
        return LabelFile.read(value)
    if value not in LABEL_SPACE_MODES:
        raise ConfigError(
            f"label_space must be one of {LABEL_SPACE_MODES} or the path of a label "
            f"file that ends in .json, got {value!r}."
        )
    return value


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
            text = read_text(Path(path).expanduser())
            content = json.loads(text, object_pairs_hook=_without_doubles)
        except OSError as error:
            raise ConfigError(
                f"label_space: {path} cannot be read (seen from {Path.cwd()}): "
                f"{error.strerror}. damex data labels CONFIG --out {path}, or folders "
                "in place of CONFIG, writes one to begin with."
            ) from error
        except DataError as error:
            raise ConfigError(f"label_space: {error}") from error
        except ValueError as error:
            raise ConfigError(f"label_space: {path}: {error}") from error
        return cls.from_content(content, where=str(path))

    @classmethod
    def from_content(cls, content: Any, *, where: str = "label_space") -> LabelFile:
        """Build from a parsed file called ``where``; ConfigError if it is invalid."""
        if not isinstance(content, Mapping):
            raise ConfigError(f"{where} must hold {FORM}, got {content!r}.")
        for problem in _problems(content):
            raise ConfigError(f"{where}{problem}")
        datasets = {name: dict(row) for name, row in content["datasets"].items()}
        return cls(datasets, content.get("unlisted", "union"), where)

    def to_content(self) -> dict[str, Any]:
        """Plain values for :meth:`from_content`."""
        return dict(
            version=VERSION,
            unlisted=self.unlisted,
            datasets={name: dict(classes) for name, classes in self.datasets.items()},
        )

    def to_text(self) -> str:
        """The file, one line per class."""
        return json.dumps(self.to_content(), indent=2, ensure_ascii=False) + "\n"

    def only(self, *datasets: str) -> LabelFile:
        """The label file restricted to some datasets."""
        found = {name: row for name, row in self.datasets.items() if name in datasets}
        return replace(self, datasets=found)

    def partitioned(self) -> LabelFile:
        """The label file with classes ``dataset/class`` that no datasets share."""
        found = {
            dataset: {own: to and f"{dataset}/{to}" for own, to in row.items()}
            for dataset, row in self.datasets.items()
        }
        unlisted = "partitioned" if self.unlisted == "union" else self.unlisted
        return replace(self, datasets=found, unlisted=unlisted)

    def dropped(self, dataset: str) -> tuple[str, ...]:
        """Names of a dataset's classes that the file leaves out."""
        listed = self.datasets.get(dataset, {})
        return tuple(own for own, target in listed.items() if target is None)

    def mapping(
        self, dataset: str, own: Sequence[str], renamed: Mapping[str, str]
    ) -> dict[str, str]:
        """Map the class names ``own`` of a dataset to the mixture, except dropped ones.

        ``renamed`` is the ``rename`` of its entry. ConfigError if a listed or renamed
        class is unknown, a class is both, an unlisted one is an error, or no class
        stays.
        """
        listed = self.datasets.get(dataset, {})
        for names, what in (
            (renamed, f"dataset {dataset!r}: rename names the class"),
            (listed, f"{self.where}: dataset {dataset!r} has no class"),
        ):
            for name in names:
                check_known(name, own, f"{what} {name!r}")
        for name in [name for name in listed if name in renamed]:
            raise ConfigError(
                f"{self.where} lists the class {name!r} of dataset {dataset!r}, which "
                "'rename' of its mixture entry changes, too; keep one of them."
            )
        prefix = f"{dataset}/" if self.unlisted == "partitioned" else ""
        kept: dict[str, str] = {}
        for name in own:
            target = listed.get(name, prefix + renamed.get(name, name))
            if name not in listed and self.unlisted == "error":
                raise ConfigError(
                    f"{self.where} does not list the class {name!r} of dataset "
                    f"{dataset!r}; add it (null leaves a class out), or set "
                    '"unlisted": "union".'
                )
            if target is not None and (name in listed or self.unlisted != "drop"):
                kept[name] = target
        if not kept:
            raise ConfigError(
                f"{self.where} leaves no class of dataset {dataset!r}; keep one, or "
                "remove the dataset from the mixture."
            )
        return kept


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the content of a label file, to follow its name."""
    for key in content:
        if key not in KEYS:
            yield f" has the unknown key {key!r}; {did_you_mean(key, KEYS)}"
    if (version := content.get("version")) != VERSION:
        yield f": version must be {VERSION}, got {version!r}."
    if (unlisted := content.get("unlisted", "union")) not in UNLISTED:
        yield f": unlisted must be one of {UNLISTED}, got {unlisted!r}."
    datasets: Any = content.get("datasets")
    rows = datasets.values() if isinstance(datasets, Mapping) else [None]
    if not all(isinstance(row, Mapping) for row in rows):
        yield f": datasets must be as in {FORM}, got {datasets!r}."
    for name, row in datasets.items():
        for own, target in row.items():
            if target is not None and not (isinstance(target, str) and target.strip()):
                yield (
                    f": dataset {name!r}: class {own!r} must become a name, or null to "
                    f"leave it out; got {target!r}."
                )


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError for a repeated key (JSON keeps the last one)."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands twice in one object; remove one of them.")
        found[key] = value
    return found


@dataclass(frozen=True)
class LabelSpace:
    """The classes of a mixture, and those that each dataset annotates.

    Labels are indices into ``classes``, independent of the order of categories in
    files.

    Args:
        dataset_names: The datasets, in the order of the mixture.
        dataset_classes: Per dataset: its class name -> name in ``classes``.
        groups: Per dataset: name of the group that shares experts.
    """

    classes: tuple[str, ...]
    dataset_names: tuple[str, ...]
    dataset_classes: tuple[Mapping[str, str], ...]
    groups: tuple[str, ...]

    @classmethod
    def from_specs(
        cls,
        specs: Sequence[DatasetSpec],
        *,
        mode: str | LabelFile | Mapping[str, Any] = "union",
    ) -> LabelSpace:
        """Build the label space of a mixture.

        With mode ``union`` equal class names are one class; with ``partitioned`` every
        dataset keeps its classes, as ``dataset/class``; a label file decides class by
        class. ConfigError if the mode is unknown, or the file does not fit.
        """
        if isinstance(mode, Mapping) and "classes" in mode:  # of a trained mixture
            return cls.from_metainfo(mode)
        rules = mode if isinstance(mode, LabelFile) else read_label_space(mode)
        if isinstance(rules, str):
            rules = LabelFile({}, unlisted=rules)
        names = [spec.name for spec in specs]
        for name in rules.datasets:
            if name not in names:
                raise ConfigError(
                    f"{rules.where} lists the dataset {name!r}; "
                    f"{did_you_mean(name, names).replace('it has', 'the mixture has')}"
                )
        mappings = [rules.mapping(s.name, s.own_classes, s.rename) for s in specs]
        classes = dict.fromkeys(name for m in mappings for name in m.values())
        return cls(
            classes=tuple(classes),
            dataset_names=tuple(names),
            dataset_classes=tuple(mappings),
            groups=tuple(spec.group_name for spec in specs),
        )

    @classmethod
    def from_metainfo(cls, metainfo: Mapping[str, Any]) -> LabelSpace:
        """Inverse of :meth:`to_metainfo`, for instance for a checkpoint."""
        datasets = metainfo["datasets"]
        return cls(
            classes=tuple(metainfo["classes"]),
            dataset_names=tuple(entry["name"] for entry in datasets),
            dataset_classes=tuple(dict(entry["classes"]) for entry in datasets),
            groups=tuple(entry["group"] for entry in datasets),
        )

    def check(self, specs: Sequence[DatasetSpec], *, mode: str | LabelFile) -> None:
        """Reject a label space that does not follow from a mixture; reads no files.

        ConfigError if the datasets or their entries have changed.
        """
        names = tuple(spec.name for spec in specs)
        fits = names == self.dataset_names
        if fits:
            left_out = mode.dropped if isinstance(mode, LabelFile) else lambda _: ()
            known = [
                replace(spec, classes=spec.classes or (*held, *left_out(spec.name)))
                for spec, held in zip(specs, self.dataset_classes, strict=True)
            ]
            made = self.from_specs(known, mode=mode)
            # A dumped config reorders the keys of a dict, here classes.
            fits = (
                sorted(made.classes) == sorted(self.classes)
                and made.dataset_classes == self.dataset_classes
                and made.groups == self.groups
            )
        if not fits:
            raise ConfigError(
                f"the mixture of {', '.join(names)} does not lead to the label_space "
                "that the config holds; to make a new one, remove label_space from the "
                "datasets of its dataloaders."
            )

    def to_metainfo(self) -> dict[str, Any]:
        """Plain values for mmdet's ``metainfo``, which is stored in the checkpoint."""
        rows = zip(self.dataset_names, self.dataset_classes, self.groups, strict=True)
        return dict(
            classes=self.classes,
            datasets=[
                dict(name=name, classes=dict(mapping), group=group)
                for name, mapping, group in rows
            ],
        )

    @property
    def group_names(self) -> tuple[str, ...]:
        """The groups, in the order of their first datasets."""
        return tuple(dict.fromkeys(self.groups))

    @property
    def num_classes(self) -> int:
        """Number of classes of the detector."""
        return len(self.classes)

    def dataset_id(self, name: str) -> int:
        """Index of a dataset; ConfigError if it is unknown."""
        check_known(name, self.dataset_names, f"the mixture has no dataset {name!r}")
        return self.dataset_names.index(name)

    def group_id(self, dataset_id: int) -> int:
        """Index of the group of a dataset."""
        return self.group_names.index(self.groups[dataset_id])

    def local_to_global(self, dataset_id: int, own: Sequence[str]) -> list[int]:
        """Mixture labels of a dataset's classes; ConfigError for an unknown class."""
        mapping = self.dataset_classes[dataset_id]
        where = f"dataset {self.dataset_names[dataset_id]!r}"
        for name in own:
            words = f"{where}: class {name!r} is not in the label space"
            check_known(name, mapping, words)
        return [self.classes.index(mapping[name]) for name in own]

    def valid_labels(self, dataset_id: int) -> list[int]:
        """Sorted mixture labels that a dataset annotates."""
        names = self.dataset_classes[dataset_id].values()
        return sorted({self.classes.index(name) for name in names})

    def labels_by_group(self) -> list[list[int]]:
        """Sorted mixture labels that the datasets of each group annotate."""
        found: dict[str, set[int]] = {name: set() for name in self.group_names}
        for number, group in enumerate(self.groups):
            found[group] |= {*self.valid_labels(number)}
        return [sorted(labels) for labels in found.values()]

    def coverage(self) -> dict[str, list]:
        """Lists ``labels`` (:meth:`valid_labels`) and ``groups`` (index) by dataset."""
        ids = range(len(self.dataset_names))
        return dict(
            labels=[self.valid_labels(dataset_id) for dataset_id in ids],
            groups=[self.group_id(dataset_id) for dataset_id in ids],
        )
