"""Images and videos with drawn detections, written into a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from PIL import Image

from damex.drawing import draw_boxes, palette
from damex.errors import ConfigError, DataError
from damex.files import atomic_write, make_folder
from damex.inference.media import frame_count, is_video, open_video

if TYPE_CHECKING:
    from damex.inference.predictor import Prediction

CODEC = "mp4v"


class Drawings:
    """A folder of images and videos with drawn detections; use ``with``.

    Args:
        folder: Output folder; created if missing.
        names: Name of each input file below the folder. Images that are not .jpg or
            .png get .png appended, videos .mp4.
        classes: Classes of the detector; each has its color.
    """

    def __init__(
        self, folder: Path, names: Mapping[Path, str], classes: Sequence[str]
    ) -> None:
        self._folder, self._names = folder, _drawn_names(names)
        self._colors = palette(classes)
        self._video: _DrawnVideo | None = None

    def add(self, one: Prediction) -> None:
        """Draw an image, or the next frame of a video; one video must follow the other.

        Predictions need their images (``keep_images``). ConfigError if the source would
        be replaced, or a video cannot be written.
        """
        if one.path is None or one.image is None:
            raise ValueError("Drawings: the prediction needs a file and its image")
        found = zip(one.names, one.scores, strict=True)
        labels = [f"{name} {score:.2f}" for name, score in found]
        colors = [self._colors[name] for name in one.names]
        drawn = draw_boxes(one.image, one.boxes, labels, colors)
        if one.frame is None:
            with atomic_write(self._target_of(one.path)) as part:
                Image.fromarray(drawn).save(part, quality=92)
            return
        if self._video is None or self._video.source != one.path:
            self.close()
            self._video = _DrawnVideo(one.path, self._target_of(one.path), drawn.shape)
        self._video.write(drawn)

    def _target_of(self, path: Path) -> Path:
        """Output path of a file; inside the folder even through links."""
        target = self._folder / self._names[path]
        place = target.resolve()
        if not place.is_relative_to(self._folder.resolve()) or place == path.resolve():
            raise ConfigError(f"--draw would replace {place}; name another folder.")
        return target

    def close(self) -> None:
        """Finish the current video."""
        video, self._video = self._video, None
        if video is not None:
            video.close()

    def __enter__(self) -> Drawings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drawn_names(names: Mapping[Path, str]) -> dict[Path, str]:
    """Unique output names: images in .png or .jpg, videos in .mp4."""
    drawn: dict[Path, str] = {}
    taken = {str(folder) for name in names.values() for folder in Path(name).parents}
    for keeps_name in (True, False):
        for path, name in names.items():
            known = (".mp4",) if is_video(path) else (".png", ".jpg", ".jpeg")
            if (Path(name).suffix.lower() in known) != keeps_name:
                continue
            while not keeps_name and (name == names[path] or name in taken):
                name += known[0]
            drawn[path] = name
            taken.add(name)
    return drawn


class _DrawnVideo:
    """Writer of frames of one shape at the rate of a source video."""

    def __init__(self, source: Path, target: Path, shape: Sequence[int]) -> None:
        self.source, self._written = source, 0
        fps = open_video(source).get(cv2.CAP_PROP_FPS)
        with ExitStack() as stack:
            self._part = stack.enter_context(atomic_write(target))
            codec = cv2.VideoWriter.fourcc(*CODEC)
            size = (shape[1], shape[0])
            self._writer = cv2.VideoWriter(str(self._part), codec, fps, size)
            if not self._writer.isOpened():
                raise ConfigError(
                    f"OpenCV cannot write the video {target}; leave --draw out for "
                    "videos, or install an opencv-python with FFmpeg."
                )
            self._until_close = stack.pop_all()

    def write(self, rgb_HWC: np.ndarray) -> None:
        self._writer.write(np.ascontiguousarray(rgb_HWC[..., ::-1]))
        self._written += 1

    def close(self) -> None:
        """Rename the finished video if complete: OpenCV does not report a full disk."""
        with self._until_close:
            self._writer.release()
            try:
                written = frame_count(open_video(self._part))
            except DataError:
                written = 0
            if written < self._written:
                raise OSError(f"{written} of {self._written} frames could be stored")


def check_draw_folder(folder: Path, images: Sequence[Path]) -> None:
    """Reject a folder with images to draw: drawings keep their names (ConfigError)."""
    make_folder(folder)
    for image in images:
        places = image.resolve().parent, image.parent.resolve()
        if any(place.is_relative_to(folder.resolve()) for place in places):
            raise ConfigError(
                f"--draw would write to {folder}, where {image} lies, and could "
                "replace images; name another folder."
            )
