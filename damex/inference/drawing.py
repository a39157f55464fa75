"""Boxes with labels in images and videos, for every command that draws."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from damex.errors import ConfigError, DataError
from damex.files import atomic_write
from damex.inference.media import frame_count, is_video, open_video

if TYPE_CHECKING:
    from damex.inference.predictor import Prediction

LINE, TEXT = 200, 60  # an image's longer side over the width of lines, height of text
ANGLE = 0.61803399  # the golden angle: consecutive classes get distant colors
CODEC = "mp4v"

Color = tuple[int, int, int]


def palette(names: Iterable[str]) -> dict[str, Color]:
    """A distinct color for each class, dark enough for white text."""
    colors = {}
    for number, name in enumerate(names):
        hue, value = number * ANGLE % 1, (0.75, 0.55)[number // 8 % 2]
        red, green, blue = colorsys.hsv_to_rgb(hue, 0.95, value)
        colors[name] = round(255 * red), round(255 * green), round(255 * blue)
    return colors


def draw_boxes(
    image_HWC: np.ndarray,
    boxes_N4: np.ndarray | Sequence[Sequence[float]],
    labels: Sequence[str],
    colors: Sequence[Color],
    *,
    dashed: Sequence[bool] = (),
) -> np.ndarray:
    """Return a copy of an image with boxes, the first ones on top.

    Args:
        image_HWC: uint8 RGB.
        boxes_N4: Corners x1, y1, x2, y2 in pixels.
        labels: Text at each box; empty for none.
        colors: RGB of each box.
        dashed: Whether a box has a dashed line; none by default.
    """
    image = Image.fromarray(np.ascontiguousarray(image_HWC))
    longer = max(image.size)
    pen, width = ImageDraw.Draw(image), max(longer // LINE, 2)
    font = ImageFont.load_default(max(longer // TEXT, 12))
    corners = np.asarray(boxes_N4, float).reshape(-1, 4).tolist()
    rows = [*zip(corners, labels, colors, strict=True)][::-1]
    lines = [*(dashed or [False] * len(rows))][::-1]
    for (corner, _, color), is_dashed in zip(rows, lines, strict=True):
        if is_dashed:
            _dash(pen, corner, color, width)
        else:
            pen.rectangle(corner, outline=color, width=width)
    height = math.ceil(font.getbbox("Ag")[3])
    for (left, top, _, _), label, color in rows:
        label = " ".join(label.split())  # a line break has no length
        if label:
            wide = math.ceil(pen.textlength(label, font)) + 4
            left = max(0.0, min(left, image.width - wide))
            top = top - height if top >= height else top
            top = max(0.0, min(top, image.height - height))
            pen.rectangle((left, top, left + wide, top + height), fill=color)
            pen.text((left + 2, top), label, fill="white", font=font)
    return np.asarray(image)


def _dash(
    pen: ImageDraw.ImageDraw, corner: Sequence[float], color: Color, width: int
) -> None:
    """Draw the outline of a box in dashes of four times their width."""
    left, top, right, bottom = corner
    dash = 4 * width
    for x in np.arange(left, right, 2 * dash).tolist():
        end = min(x + dash, right)
        pen.line((x, top, end, top), fill=color, width=width)
        pen.line((x, bottom, end, bottom), fill=color, width=width)
    for y in np.arange(top, bottom, 2 * dash).tolist():
        end = min(y + dash, bottom)
        pen.line((left, y, left, end), fill=color, width=width)
        pen.line((right, y, right, end), fill=color, width=width)


class Drawings(AbstractContextManager["Drawings"]):
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
