"""From an image, in a file or in memory, to the input of a detector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import Compose

from damex.errors import DataError
from damex.inference.images import fault_of

Picture = str | Path | np.ndarray


class Inputs:
    """What the pipeline of a training makes of images.

    Args:
        pipeline: Steps without annotations, from ``LoadImageFromFile`` on.
    """

    def __init__(self, pipeline: Sequence[Mapping[str, Any]]) -> None:
        load, *rest = pipeline
        self._load, self._prepare = Compose([load]), Compose(rest)

    def __call__(self, image: Picture) -> dict[str, Any]:
        """Prepare one image.

        Returns:
            ``inputs`` and ``data_samples``, as mmdet packs them.

        Raises:
            DataError: If it cannot be read.
        """
        return self._prepare(self._read(image))

    def _read(self, image: Picture) -> dict[str, Any]:
        """An image as the first step of the pipeline hands it on.

        Raises:
            DataError: If it cannot be read.
        """
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise DataError(
                    "an image must be a uint8 array (height, width, 3) in RGB, got "
                    f"{image.dtype} of shape {image.shape}."
                )
            size = image.shape[:2]
            bgr = np.ascontiguousarray(image[..., ::-1])
            return dict(
                img=bgr, img_path=None, img_id=0, img_shape=size, ori_shape=size
            )
        fault, cause = fault_of(Path(image)), None
        if fault is None:
            try:
                return self._load(dict(img_path=str(image), img_id=0))
            except Exception as error:  # readers raise whatever a file leads them to
                fault, cause = "is no image that can be read", error
        raise DataError(f"{image} {fault}.") from cause
