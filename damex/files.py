"""Files written whole or not at all, and HTML pages."""

from __future__ import annotations

import base64
import io
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from PIL import Image

from damex.errors import ConfigError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file whole or not at all; missing folders are created.

    Yields a path in the same folder, with the same suffix, which replaces the file at
    the end of the block and is removed if the block raises. Links are followed, devices
    and pipes are written directly. Pass an open file to `torch.save`: given a path, it
    hides the reason of a failure.

    Raises:
        ConfigError: If the file cannot be written, for instance on a full disk.
    """
    check_file(Path(path))
    target = Path(path).resolve()
    part = target
    if target.is_file() or not target.exists():
        part = target.with_name(f".part-{uuid.uuid4().hex[:8]}{target.suffix}")
    try:
        yield part
        if part != target:
            part.replace(target)
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


def fill(package: str, **values: Any) -> str:
    """Fill the template ``page.html`` of a package, which may extend ``base.html``.

    Text is escaped. The values include a ``title``.
    """
    loaders = [PackageLoader(package, ""), PackageLoader("damex", "")]
    environment = Environment(loader=ChoiceLoader(loaders), autoescape=True)
    return environment.get_template("page.html").render(**values)


def css_color(color: tuple[int, int, int]) -> str:
    """Return an 8-bit RGB colour for a style sheet."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def data_uri(picture: Image.Image) -> str:
    """Return a picture as a data URI, to embed it into a page."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
