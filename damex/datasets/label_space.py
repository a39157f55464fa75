"""LabelSpace: one list of classes for all datasets of a mixture, mapped by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from damex.datasets.label_file import LabelFile
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError, did_you_mean

LABEL_SPACE_MODES = ("union", "partitioned")


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
class LabelSpace:
    """The classes of a mixture, and those that each dataset annotates.

    Labels are indices into ``classes``, independent of the order of categories in
    files.

    Args:
        classes: All class names.
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
        class.

        Raises:
            ConfigError: If the mode is unknown, or the file does not fit.
        """
        rules = mode if isinstance(mode, LabelFile) else read_label_space(mode)
        if isinstance(rules, str):
            rules = LabelFile({}, unlisted=rules)
        rules.check_datasets([spec.name for spec in specs])
        mappings = []
        for spec in specs:
            spec.mixture_classes()  # rejects a 'rename' of an unknown class
            own = spec.own_classes
            mappings.append(rules.mapping(spec.name, own, spec.rename))
        classes = dict.fromkeys(name for m in mappings for name in m.values())
        return cls(
            classes=tuple(classes),
            dataset_names=tuple(spec.name for spec in specs),
            dataset_classes=tuple(mappings),
            groups=tuple(spec.group_name for spec in specs),
        )

    @classmethod
    def of(
        cls, specs: Sequence[DatasetSpec], mode: str | Mapping[str, Any]
    ) -> LabelSpace:
        """The label space of a trained mixture, or a new one as in `from_specs`."""
        if isinstance(mode, Mapping) and "classes" in mode:
            return cls.from_metainfo(mode)
        return cls.from_specs(specs, mode=mode)

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

        Raises:
            ConfigError: If the datasets or their entries have changed.
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
        if name not in self.dataset_names:
            raise ConfigError(
                f"the mixture has no dataset {name!r}; "
                f"{did_you_mean(name, self.dataset_names)}"
            )
        return self.dataset_names.index(name)

    def group_id(self, dataset_id: int) -> int:
        """Index of the group of a dataset."""
        return self.group_names.index(self.groups[dataset_id])

    def local_to_global(self, dataset_id: int, own: Sequence[str]) -> list[int]:
        """Mixture labels of a dataset's classes; ConfigError for an unknown class."""
        mapping = self.dataset_classes[dataset_id]
        for name in own:
            if name not in mapping:
                raise ConfigError(
                    f"dataset {self.dataset_names[dataset_id]!r}: class {name!r} is "
                    f"not in the label space; {did_you_mean(name, mapping)}"
                )
        return [self.classes.index(mapping[name]) for name in own]

    def valid_labels(self, dataset_id: int) -> list[int]:
        """Sorted mixture labels that a dataset annotates."""
        names = self.dataset_classes[dataset_id].values()
        return sorted({self.classes.index(name) for name in names})

    def coverage(self) -> dict[str, list]:
        """Lists ``labels`` (:meth:`valid_labels`) and ``groups`` (index) by dataset."""
        ids = range(len(self.dataset_names))
        return dict(
            labels=[self.valid_labels(dataset_id) for dataset_id in ids],
            groups=[self.group_id(dataset_id) for dataset_id in ids],
        )
