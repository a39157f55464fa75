"""Images and videos: found, named, read, and written with detections.

Imports no torch.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from damex.datasets.image_files import IMAGE_SUFFIXES, list_files
from damex.drawing import draw_boxes, palette
from damex.errors import ConfigError, DataError, printable
from damex.files import atomic_write, make_folder

if TYPE_CHECKING:
    from damex.inference.predictor import Prediction


# Videos that OpenCV cannot read are reported at the end.
SUFFIXES = (*sorted(IMAGE_SUFFIXES), ".avif", ".heic", ".heif")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm")


# Cameras (also by number), streams and URLs; Path leaves one slash of two.
_NO_FILE = re.compile(r"\d+|/dev/.+|[A-Za-z][\w+.-]+:/.*")


def find_images(words: Sequence[str], *, videos: bool = False) -> list[Path]:
    """Find the images (and ``videos``) of files, folders and patterns, each once.

    Files may have any name. Folders are searched recursively, through links, too;
    images without a suffix are included, hidden files and folders are not. Other words
    are patterns (``*``, ``**``, ``?``).

    Raises:
        DataError: If a word matches nothing.
    """
    found: dict[Path, Path] = {}
    suffixes = (*SUFFIXES, *VIDEO_SUFFIXES) if videos else SUFFIXES
    for word in words:
        files = _files_of(word, suffixes)
        if not files:
            raise DataError(_no_image(word, suffixes))
        for file in files:
            found.setdefault(_place(file), file)
    return list(found.values())


def _no_image(word: str, suffixes: Sequence[str]) -> str:
    """Why a word stands for no image."""
    if _NO_FILE.fullmatch(word) and not Path(word).is_dir():
        return (
            f"{word} is not a file: cameras, streams and URLs are not read. Save what "
            "they show, or read it in Python, for instance with cv2.VideoCapture, and "
            "pass the frames as RGB arrays: "
            "damex.load(CHECKPOINT).predict(frames, batch_size=1)."
        )
    what = "image in the folder" if Path(word).is_dir() else "file or folder"
    return (
        f"there is no {what} {word} (seen from {Path.cwd()}); images end in "
        f"{', '.join(suffixes)}."
    )


def _files_of(word: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(word)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = [path / name for name, _ in sorted(list_files(str(path)))]
    else:
        names = glob.glob(word, recursive=True)  # noqa: PTH207 (absolute ones, too)
        inside = [Path(name) for name in sorted(names) if not _is_loop(Path(name))]
    return [p for p in inside if p.is_file() and _is_wanted(p, suffixes)]


def _is_loop(path: Path) -> bool:
    """Whether a path enters one folder twice, through a link; ``**`` follows these."""
    folders = [os.path.realpath(folder) for folder in _place(path).parents]
    return len({*folders}) < len(folders)


def _is_wanted(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether a file has one of the suffixes, or none and image content."""
    if path.suffix:
        return path.suffix.lower() in suffixes
    try:
        with Image.open(path):
            return True
    except Image.DecompressionBombError:
        return True  # reported when it is read
    except Exception:  # Pillow's readers raise anything
        return False


def _place(path: Path) -> Path:
    """Absolute path without ``..``; links are kept if possible."""
    path = path.absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def names_of(paths: Sequence[Path]) -> list[str]:
    """Unique relative names for files, without ``..``, from their common folder."""
    places = [_place(path) for path in paths]
    # Windows drive letters become folders.
    rooted = [
        PurePosixPath("/", place.anchor.strip(":\\/"), *place.parts[1:])
        for place in places
    ]
    shared = posixpath.commonpath([path.parent for path in rooted]) if rooted else ""
    return [printable(str(path.relative_to(shared))) for path in rooted]


def fault_of(path: Path) -> str | None:
    """Why an image file is broken although OpenCV may read it; None if it is fine.

    OpenCV fills truncated files with gray, and decodes bombs of a gigabyte of pixels.
    """
    try:
        with Image.open(path) as image:
            image.draft(None, (1, 1))  # an eighth of a JPEG's size: faster
            image.load()
    except FileNotFoundError:
        return "does not exist"
    except IsADirectoryError:
        return "is a folder; give the files in it"
    except Image.DecompressionBombError as error:
        return f"is too large ({str(error).rstrip('.')}); cut it into tiles"
    except UnidentifiedImageError:
        return None  # other readers support more formats
    except Exception as error:  # PIL's readers raise anything
        return f"cannot be decoded to its end ({error})"
    return None


def is_video(path: Path) -> bool:
    """Whether a file has the suffix of a video."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def open_video(path: Path) -> cv2.VideoCapture:
    """Open a video; DataError if OpenCV cannot read it."""
    if not path.is_file():
        raise DataError(f"{path} does not exist.")
    if printable(str(path)) != str(path):
        raise DataError(
            f"{path} has a name that is not UTF-8, which OpenCV cannot open; rename it."
        )
    video = cv2.VideoCapture(str(path))
    if not video.isOpened():
        raise DataError(f"{path} is not a video that OpenCV can read.")
    return video


def frame_count(video: cv2.VideoCapture) -> int:
    """The stated number of frames: <= 0 if unknown, often one too many."""
    return int(video.get(cv2.CAP_PROP_FRAME_COUNT))


def frames_of(path: Path) -> Iterator[np.ndarray]:
    """Iterate over the frames of a video, uint8 (height, width, 3) in BGR.

    Raises:
        DataError: If it cannot be read, or ends early (known after the last frame).
    """
    video, read, reached = open_video(path), 0, 0
    fps = video.get(cv2.CAP_PROP_FPS)
    while (frame := video.read())[0]:
        read += 1
        yield frame[1]
        # Some formats only state a duration; the count is then estimated from the rate.
        seconds = video.get(cv2.CAP_PROP_POS_MSEC) / 1000
        reached = max(read, round(seconds * fps) + 1)
    if read == 0:
        raise DataError(f"{path} holds no frame that OpenCV can read.")
    stated = frame_count(video)
    if stated - reached > 1:
        raise DataError(f"{path} breaks off: {read} of {stated} frames could be read.")


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
