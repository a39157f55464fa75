"""The five datasets of the bundled mixture and their sizes."""

from __future__ import annotations

from damex.datasets.minimix import arcade, digits, photos, playroom, shapes
from damex.datasets.minimix.spec import DatasetSpec

DATASETS = (
    DatasetSpec("shapes", shapes.CLASSES, 900, 60, shapes.build_renderer),
    DatasetSpec("digits", digits.CLASSES, 500, 60, digits.build_renderer),
    DatasetSpec("photos", photos.CLASSES, 250, 60, photos.build_renderer),
    DatasetSpec("playroom", playroom.CLASSES, 120, 60, playroom.build_renderer),
    DatasetSpec("arcade", arcade.CLASSES, 60, 60, arcade.build_renderer),
)
