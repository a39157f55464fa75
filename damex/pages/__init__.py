"""HTML pages that need nothing outside of themselves."""

from __future__ import annotations

import base64
import io
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from PIL import Image

JPEG_QUALITY = 80


def fill(package: str, **values: Any) -> str:
    """Fill the template ``page.html`` of a package.

    Args:
        package: Where the template is; it may extend ``base.html``, which has the
            title, the looks and the colours for light and dark screens.
        **values: Names in the template, ``title`` among them. Text is escaped.
    """
    loaders = [PackageLoader(name, "") for name in (package, "damex.pages")]
    environment = Environment(loader=ChoiceLoader(loaders), autoescape=True)
    return environment.get_template("page.html").render(**values)


def css_color(color: tuple[int, int, int]) -> str:
    """A colour as style sheets write it."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def data_uri(picture: Image.Image) -> str:
    """A picture as the address of itself."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
