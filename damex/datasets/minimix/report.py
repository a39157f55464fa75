"""What a generation made: counts per dataset, and the seconds it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetReport:
    """Counts of one dataset.

    Attributes:
        name: Folder name.
        num_images: Number of images of each split.
        num_boxes: Number of boxes of each split.
        classes: Class names in the order of their category ids.
    """

    name: str
    num_images: dict[str, int]
    num_boxes: dict[str, int]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class MinimixReport:
    """Counts of all datasets.

    Attributes:
        datasets: One entry per dataset.
        seconds: Time that the generation took, 0.0 if nothing had to be made.
        created: False if the folder already held this very mixture.
    """

    datasets: tuple[DatasetReport, ...]
    seconds: float
    created: bool

    def table(self) -> str:
        """Return the counts as text, one row per dataset and a closing line."""
        rows = [f"{'dataset':<10}{'images train/val':>18}{'boxes':>14}  classes"]
        for entry in self.datasets:
            images = "{train}/{val}".format(**entry.num_images)
            boxes = "{train}/{val}".format(**entry.num_boxes)
            classes = ", ".join(entry.classes)
            rows.append(f"{entry.name:<10}{images:>18}{boxes:>14}  {classes}")
        names = {name for entry in self.datasets for name in entry.classes}
        done = f"made in {self.seconds:.1f} s" if self.created else "already there"
        rows.append(f"{len(names)} distinct class names; {done}")
        return "\n".join(rows)
