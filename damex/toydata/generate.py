"""Generate the mixture, atomically."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from damex.errors import ConfigError, DataError
from damex.toydata.domains import DATASETS, SPLITS, DatasetSpec, Renderer
from damex.toydata.drawing import Box, Canvas

VERSION = "1.3"
STAMP_NAME = "toy.json"

_OWN_FILE = re.compile(r"[a-z]+/((train|val)\.json|images/(train|val)_\d{5}\.jpg)")
_LICENSE = "Apache-2.0; digits: CC BY 4.0; photographs: CC BY 2.0 (see data/README.md)"
# Mostly square; the others make batches need padding.
_SIZES_HW = ((128, 128), (128, 128), (128, 128), (96, 128), (128, 96))
_JPEG_QUALITY = 60


@dataclass(frozen=True)
class ToyReport:
    """Report of a generation.

    Attributes:
        datasets: For each dataset its ``name``, ``num_images`` and ``num_boxes`` by
            split, and ``classes`` in the order of their category ids.
        seconds: Duration; 0.0 if the mixture existed.
        created: False if the folder already held this mixture.
    """

    datasets: list[dict[str, Any]]
    seconds: float
    created: bool

    def table(self) -> str:
        """Return the counts as text, one row per dataset and a closing line."""
        rows = [f"{'dataset':<10}{'images train/val':>18}{'boxes':>14}  classes"]
        for entry in self.datasets:
            images = "{train}/{val}".format(**entry["num_images"])
            boxes = "{train}/{val}".format(**entry["num_boxes"])
            classes = ", ".join(entry["classes"])
            rows.append(f"{entry['name']:<10}{images:>18}{boxes:>14}  {classes}")
        names = {name for entry in self.datasets for name in entry["classes"]}
        done = f"made in {self.seconds:.1f} s" if self.created else "already there"
        rows.append(f"{len(names)} distinct class names; {done}")
        return "\n".join(rows)


def generate_toy_mixture(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    specs: Sequence[DatasetSpec] = DATASETS,
) -> ToyReport:
    """Generate the toy mixture of small detection datasets.

    The files are made in a temporary folder next to `out` and moved there when
    complete, as marked by the stamp `toy.json`. Equal arguments give equal files (with
    the same Pillow and NumPy). If `out` already holds this mixture, nothing is done.
    `force` replaces an earlier one, or writes into a folder with other content; only
    files of an earlier generation are ever deleted.

    Raises:
        ConfigError: If the seed is negative.
        DataError: If `out` holds something else and `force` is not set, or if foreign
            files are in the way.
    """
    if seed < 0:
        raise ConfigError(f"toy mixture: seed must be 0 or more, got {seed}")
    out = Path(out)
    key = _key(specs, seed)
    held = _read_stamp(out)
    if held is not None and held["key"] == key and not force:
        return ToyReport(held["datasets"], seconds=0.0, created=False)
    _check_free(out, specs, held, force=force)
    is_filled = out.is_dir() and any(out.iterdir())
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        entries = [write_dataset(made, spec, seed=seed) for spec in specs]
        files = [file for spec in specs for file in _file_names(spec)]
        stamp = {"key": key, "datasets": entries, "files": files}
        _write_json(made / STAMP_NAME, stamp)
        if held is not None:
            _remove(out, held["files"])
        if is_filled:
            _merge(made, out, files)
        else:
            _rename(made, out, key)
    return ToyReport(entries, seconds=time.perf_counter() - start, created=True)


def write_dataset(root: Path, spec: DatasetSpec, *, seed: int) -> dict[str, Any]:
    """Render a dataset into a new folder; return its entry of `ToyReport.datasets`."""
    (root / spec.name / "images").mkdir(parents=True)
    return {
        "name": spec.name,
        "num_images": {split: spec.num_images(split) for split in SPLITS},
        "num_boxes": {split: _write_split(root, spec, split, seed) for split in SPLITS},
        "classes": list(spec.classes),
    }


def render_image(
    spec: DatasetSpec, split: str, index: int, *, seed: int, renderer: Renderer
) -> Canvas:
    """Render an image with at least one object by a result of `spec.build_renderer`.

    The random generator depends on (seed, dataset, split, index) only, so an image does
    not change with the number or the order of the others.
    """
    key = [seed, zlib.crc32(spec.name.encode()), SPLITS.index(split), index]
    rng = np.random.default_rng(key)
    size_hw = _SIZES_HW[rng.integers(len(_SIZES_HW))]
    return renderer(size_hw, rng)


def _write_split(root: Path, spec: DatasetSpec, split: str, seed: int) -> int:
    """Write the images and the COCO json of a split; return the number of boxes."""
    folder = root / spec.name
    renderer = spec.build_renderer(split)
    category_ids = {name: i for i, name in enumerate(spec.classes, start=1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(spec.num_images(split)):
        canvas = render_image(spec, split, index, seed=seed, renderer=renderer)
        picture, name = canvas.image(), _image_name(split, index)
        picture.save(folder / "images" / name, quality=_JPEG_QUALITY, optimize=True)
        image = {"id": index + 1, "file_name": name}
        images.append(image | {"width": picture.width, "height": picture.height})
        for box in canvas.boxes():
            ids = {"id": len(annotations) + 1, "image_id": index + 1}
            category_id = category_ids[box.name]
            annotations.append(ids | {"category_id": category_id} | _geometry(box))
    info = {
        # Unchanged, so that files of a version stay byte-identical.
        "description": f"damex toy mixture: {spec.name}, {split}",
        "version": VERSION,
        "seed": seed,
        "license": _LICENSE,
    }
    categories = [{"id": i, "name": name} for name, i in category_ids.items()]
    content = {"info": info, "images": images, "annotations": annotations}
    _write_json(folder / f"{split}.json", content | {"categories": categories})
    return len(annotations)


def _geometry(box: Box) -> dict[str, Any]:
    bbox = [box.x, box.y, box.width, box.height]
    return {"bbox": bbox, "area": box.width * box.height, "iscrowd": 0}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


def _image_name(split: str, index: int) -> str:
    return f"{split}_{index:05d}.jpg"


def _file_names(spec: DatasetSpec) -> list[str]:
    """List the files of a dataset, relative to the mixture's root."""
    names = [f"{spec.name}/{split}.json" for split in SPLITS]
    for split in SPLITS:
        images = range(spec.num_images(split))
        names += [f"{spec.name}/images/{_image_name(split, i)}" for i in images]
    return names


def _key(specs: Sequence[DatasetSpec], seed: int) -> dict[str, Any]:
    sizes = {spec.name: [spec.num_train, spec.num_val] for spec in specs}
    key = {"version": VERSION, "seed": seed, "sizes": sizes}
    variants = {spec.name: spec.variant for spec in specs if spec.variant}
    return key | ({"variants": variants} if variants else {})


def _read_stamp(out: Path) -> dict[str, Any] | None:
    path = out / STAMP_NAME
    if not path.is_file():
        return None
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    if not isinstance(stamp, dict) or not {"key", "datasets", "files"} <= stamp.keys():
        return None
    # The listed files may be deleted later, so accept no other paths.
    return stamp if all(_OWN_FILE.fullmatch(file) for file in stamp["files"]) else None


def _check_free(
    out: Path, specs: Sequence[DatasetSpec], held: dict[str, Any] | None, *, force: bool
) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"toy mixture: out={str(out)!r} is a file; name a folder")
    content = sorted(path.name for path in out.iterdir())
    if content and not force:
        what = "other content" if held is None else f"the mixture {held['key']}"
        raise DataError(
            f"toy mixture: folder {str(out)!r} already holds {what} "
            f"({', '.join(content[:5])}); name another folder, or replace it with "
            "--force (force=True), which deletes only files of an earlier mixture"
        )
    own = set() if held is None else {STAMP_NAME, *held["files"]}
    wanted = [STAMP_NAME, *(file for spec in specs for file in _file_names(spec))]
    foreign = [file for file in wanted if file not in own and (out / file).exists()]
    if foreign:
        raise DataError(
            f"toy mixture: {len(foreign)} files in {str(out)!r} are in the way and "
            f"were not made here, first {foreign[0]!r}; move them or name another one"
        )


def _remove(out: Path, files: Sequence[str]) -> None:
    # Remove the stamp first: it marks a complete folder.
    (out / STAMP_NAME).unlink()
    for file in files:
        (out / file).unlink(missing_ok=True)
    folders = {folder for file in files for folder in Path(file).parents}
    for folder in sorted(folders - {Path()}, key=lambda path: -len(path.parts)):
        path = out / folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _rename(made: Path, out: Path, key: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        out.rmdir()  # succeeds for an empty folder only
    try:
        made.rename(out)
    except OSError:
        # Another process may have made the same mixture meanwhile.
        held = _read_stamp(out)
        if held is None or held["key"] != key:
            raise


def _merge(made: Path, out: Path, files: Sequence[str]) -> None:
    for file in (*files, STAMP_NAME):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (made / file).rename(out / file)
