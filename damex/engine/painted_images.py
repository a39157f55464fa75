"""PaintedImagesHook: mmdet's painted test images, one folder per dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmdet.engine.hooks import DetVisualizationHook
from mmdet.registry import HOOKS
from mmengine.runner import Runner

__all__ = ["PaintedImagesHook"]


@HOOKS.register_module()
class PaintedImagesHook(DetVisualizationHook):
    """Writes ``--show-dir`` images to a folder of the dataset that they come from.

    mmdet names them by the file alone, so that equal names of two datasets would
    replace each other.
    """

    test_out_dir: str | None

    def after_test_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any,
        outputs: Sequence[Any],
    ) -> None:
        """Paint every image of a batch into its dataset's folder."""
        folder = self.test_out_dir
        for sample in outputs:
            if folder is not None:
                # An absolute path is what mmdet's own join leaves as it is.
                root = (Path(runner.work_dir) / runner.timestamp / folder).resolve()
                name = sample.metainfo.get("dataset_name", "")
                self.test_out_dir = str(root / name)
            super().after_test_iter(runner, batch_idx, data_batch, [sample])
        self.test_out_dir = folder
