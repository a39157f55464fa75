"""Detections drawn into their images and videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import cv2
import mmcv
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from damex.curation.sheets import draw_name, palette
from damex.errors import ConfigError, DataError
from damex.files import atomic_write, make_folder
from damex.inference.images import Frame, frames_of, is_video, open_video
from damex.inference.predictor import Prediction

LINE, TEXT = 200, 60  # an image's longer side over the width of lines, height of text


class Drawings:
    """A folder of images and videos with their detections; close it, or use ``with``.

    Args:
        folder: Where they go; made where it is missing.
        names: Name of each file that was looked at, below the folder. One that is
            neither .jpg nor .png gets .png behind it, a video .mp4.
        classes: Of the detector; each has its colour.
    """

    def __init__(
        self, folder: Path, names: Mapping[Path, str], classes: Sequence[str]
    ) -> None:
        self._folder, self._names = folder, _drawn_names(names)
        self._colors = palette(classes)
        self._video: _DrawnVideo | None = None

    def add(self, one: Prediction) -> None:
        """Draw an image, or the next frame of a video.

        Args:
            one: Of a file. Frames of a video come in their order, all of one video
                before those of another.

        Raises:
            ConfigError: If it would replace the image, or a video cannot be written.
        """
        if one.path is None:
            raise ValueError("Drawings: the prediction is of an array, not of a file")
        if one.frame is None:
            # The pixels that the detector looked at: Pillow knows fewer formats, and
            # turns and scales others in its own way.
            pixels = Image.fromarray(mmcv.imread(str(one.path), channel_order="rgb"))
            image = drawn(pixels, one, self._colors)
            with atomic_write(self._target_of(one.path)) as part:
                image.save(part, quality=92)
            return
        if self._video is None or self._video.source != one.path:
            self.close()
            self._video = _DrawnVideo(one.path, self._target_of(one.path))
        pixels = self._video.pixels_of(one.frame)
        self._video.write(drawn(pixels, one, self._colors))

    def _target_of(self, path: Path) -> Path:
        """Where a file is drawn to: in the folder, even through links."""
        target = self._folder / self._names[path]
        place = target.resolve()
        if not place.is_relative_to(self._folder.resolve()) or place == path.resolve():
            raise ConfigError(f"--draw would replace {place}; name another folder.")
        return target

    def close(self) -> None:
        """End the video that is being written."""
        video, self._video = self._video, None
        if video is not None:
            video.close()

    def __enter__(self) -> Drawings:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def drawn(
    image: Image.Image, one: Prediction, colors: Mapping[str, tuple[int, int, int]]
) -> Image.Image:
    """Draw detections into an image, the best on top.

    Args:
        image: RGB; changed in place, and returned.
        one: What was found in it.
        colors: By the names of classes.
    """
    longer = max(image.size)
    font = ImageFont.load_default(max(longer // TEXT, 12))
    pen = ImageDraw.Draw(image)
    rows = [*zip(one.names, one.scores, one.boxes, strict=True)]
    for found, score, box in rows[::-1]:
        left, top, right, bottom = corner = box.tolist()
        color, width = colors[found], max(longer // LINE, 2)
        pen.rectangle((left, top, right, bottom), outline=color, width=width)
        draw_name(pen, image.size, corner, f"{found} {score:.2f}", color, font)
    return image


def _drawn_names(names: Mapping[Path, str]) -> dict[Path, str]:
    """Names of drawings, each another: images in .png or .jpg, videos in .mp4."""
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
    """A video that becomes a copy of another, frame by frame."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source = source
        self._frames: Iterator[Frame] = frames_of(source)
        self._written = 0
        video = open_video(source)
        with ExitStack() as stack:
            self._part = stack.enter_context(atomic_write(target))
            codec = cv2.VideoWriter.fourcc(*"mp4v")
            self._writer = cv2.VideoWriter(
                str(self._part), codec, video.fps, video.resolution
            )
            if not self._writer.isOpened():
                raise ConfigError(
                    f"OpenCV cannot write the video {target}; leave --draw out for "
                    "videos, or install an opencv-python with FFmpeg."
                )
            self._until_close = stack.pop_all()

    def pixels_of(self, number: int) -> Image.Image:
        """A frame that comes after those asked for before."""
        frame = next(frame for frame in self._frames if frame.number == number)
        return Image.fromarray(frame.pixels[..., ::-1])

    def write(self, image: Image.Image) -> None:
        self._writer.write(np.asarray(image)[..., ::-1])
        self._written += 1

    def close(self) -> None:
        """Name the video if it is whole: OpenCV does not report a full disk."""
        with self._until_close:
            self._writer.release()
            try:
                written = open_video(self._part).frame_cnt
            except DataError:
                written = 0
            if written < self._written:
                raise OSError(f"{written} of {self._written} frames could be stored")


def check_draw_folder(folder: Path, images: Sequence[Path]) -> None:
    """Refuse to draw where the images are: a drawing has the name of its image.

    Args:
        folder: Where drawings go.
        images: That shall be drawn.

    Raises:
        ConfigError: If one of them is in the folder, or below it, or it cannot be made.
    """
    make_folder(folder)
    for image in images:
        places = image.resolve().parent, image.parent.resolve()
        if any(place.is_relative_to(folder.resolve()) for place in places):
            raise ConfigError(
                f"--draw would write to {folder}, where {image} lies, and could "
                "replace images; name another folder."
            )
