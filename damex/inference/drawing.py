"""Draw detections into images and videos."""

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
    """A folder of images and videos with drawn detections; close it, or use ``with``.

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

        Raises:
            ConfigError: If it would replace the image, or a video cannot be written.
        """
        if one.path is None:
            raise ValueError("Drawings: the prediction is of an array, not of a file")
        if one.frame is None:
            # Pillow reads fewer formats, and turns and scales some images differently.
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
    """Draw detections into an RGB image, in place, the best on top, and return it."""
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
    """Writer of an annotated copy of a video, frame by frame."""

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
        """Read a frame; numbers must increase."""
        frame = next(frame for frame in self._frames if frame.number == number)
        return Image.fromarray(frame.pixels[..., ::-1])

    def write(self, image: Image.Image) -> None:
        self._writer.write(np.asarray(image)[..., ::-1])
        self._written += 1

    def close(self) -> None:
        """Rename the finished video if complete: OpenCV does not report a full disk."""
        with self._until_close:
            self._writer.release()
            try:
                written = open_video(self._part).frame_cnt
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
