"""Text of any encoding, files written whole or not at all, and whole folders."""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from damex.errors import ConfigError, DataError

# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Share of the characters in a file in UTF-16 that are ASCII, ends of lines included.
_UTF16_ZEROS = 0.1


def decode(raw: bytes, path: str | Path) -> str:
    """The text of the file ``path`` in UTF-8, or in UTF-16 or UTF-32 by its marks.

    Other encodings are not guessed: a wrong guess would change class names. DataError
    if the bytes are not text of the encoding.
    """
    encoding = _encoding_of(raw)
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        wrong = raw[error.start : error.start + 4].hex(" ")
        raise DataError(
            f"{path}:{line}: the bytes {wrong} are not {encoding.upper()} text; save "
            "the file as UTF-8."
        ) from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(
            f"{path}:{line}: a zero byte is not text; save the file as UTF-8."
        )
    return io.StringIO(text, newline=None).getvalue()  # any end of line becomes \n


def glance(raw: bytes) -> str:
    """Text to recognize a file by: invalid bytes become replacement characters."""
    text = raw.decode(_encoding_of(raw), errors="replace")
    return io.StringIO(text, newline=None).getvalue()


def read_text(path: str | Path) -> str:
    """Read a text file with :func:`decode`; OSError if it cannot be opened."""
    return decode(Path(path).read_bytes(), path)


def _encoding_of(raw: bytes) -> str:
    """By the byte order mark, or by the zero bytes of UTF-16 without one."""
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return encoding
    zeros = (raw[::2].count(0), raw[1::2].count(0)) if 0 in raw else (0, 0)
    if min(zeros) == 0 and max(zeros) > max(1, _UTF16_ZEROS * len(raw) / 2):
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8"


def check_free(path: Path) -> None:
    """Raise a ConfigError if a path is taken; an empty folder is as good as none."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists; remove it, or name another --out.")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file whole or not at all; missing folders are created.

    Also after a loss of power. Yields a path in the same folder, with the same suffix,
    which replaces the file at the end of the block and is removed if the block raises.
    Links are followed, devices and pipes are written directly. Pass an open file to
    `torch.save`: given a path, it hides the reason of a failure. ConfigError if the
    file cannot be written, for instance on a full disk.
    """
    check_file(Path(path))
    target = Path(path).resolve()
    part = target
    if target.is_file() or not target.exists():
        part = target.with_name(f".part-{uuid.uuid4().hex[:8]}{target.suffix}")
    try:
        yield part
        if part != target:
            _sync(part)  # a rename may reach the disk before the content
            part.replace(target)
            with suppress(OSError):  # folders cannot be opened everywhere
                _sync(target.parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch wraps the OSError
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise ConfigError(
            f"{path} was not written ({reason.strerror or reason}); free space, or "
            "name another place."
        ) from error
    finally:
        if part != target:
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Write a whole folder or nothing; an empty one may exist.

    Yields a folder next to it, which takes its name at the end of the block and is
    removed if the block raises. ConfigError if the folder cannot be written.
    """
    target = path.resolve()
    draft = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    make_folder(draft)
    try:
        yield draft
        draft.rename(target)
    except OSError as error:
        if error.filename and not Path(str(error.filename)).is_relative_to(draft):
            raise  # of a file that the block reads
        raise ConfigError(
            f"{path} was not written ({error.strerror or error}); free space, or name "
            "another place."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file with `atomic_write`."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any, *, indent: int | None = None) -> None:
    """Write a JSON file with `atomic_write`."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


def check_file(path: Path) -> None:
    """Create the folder of an output file early; ConfigError if that is impossible."""
    make_folder(path.parent)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file to write to.")


def make_folder(folder: Path) -> None:
    """Create an output folder; ConfigError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}); name another folder."
        ) from error
