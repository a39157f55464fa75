"""A model as a folder: weights in safetensors, config in JSON; no file of it is code.

Read, it is what a checkpoint holds, and passes all that checks a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from damex import __version__
from damex.errors import ConfigError, DataError
from damex.files import atomic_write, read_text, write_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = 1
META = ("moe", "epoch", "iter", "seed")  # of a checkpoint, besides config and classes
TUPLE = "tuple"  # {"tuple": [1, 2]} is (1, 2), which JSON lacks and mmcv asks for
# With fewer bits, torch cannot tell whether a number is finite.
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
AGAIN = "fetch the folder again from whoever made it, or use their checkpoint"


def is_model_folder(path: Path) -> bool:
    """Whether a path is a folder with a model, even if half of it is missing."""
    return path.is_dir() and any((path / name).exists() for name in (WEIGHTS, CONFIG))


def write_model_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any],
    label_space: Mapping[str, Any],
    **meta: Any,
) -> None:
    """Write both files into an existing folder.

    Args:
        folder: Where to write.
        state: Weights by name.
        config: The whole resolved config as plain values.
        label_space: Classes and datasets, as of ``LabelSpace.to_metainfo``.
        meta: Further metadata of the checkpoint, those of `META`.

    Raises:
        ConfigError: If a value is not JSON, a weight is not a tensor, or the disk is
            full.
    """
    # A list without a mark is what others expect of classes.
    space = dict(label_space, classes=[*label_space["classes"]])
    content = dict(format=FORMAT, damex=__version__, label_space=space, **meta)
    content["config"] = config
    plain = {key: _encoded(value, key) for key, value in content.items()}
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{key} in the weights is of type {type(tensor).__name__}, and "
                f"{WEIGHTS} holds tensors only; save a checkpoint without it."
            )
    write_json(folder / CONFIG, plain, indent=1)
    write_weights(folder, state)


def write_weights(
    folder: Path, state: Mapping[str, Tensor], name: str = WEIGHTS
) -> None:
    """Write weights next to a config, each in full, even if two share memory."""
    tensors = {key: t.detach().cpu().contiguous().clone() for key, t in state.items()}
    with atomic_write(folder / name) as part:
        try:
            save_file(tensors, part, metadata={"format": "pt", "damex": __version__})
        except SafetensorError as error:  # wraps an OSError of Rust
            raise OSError(str(error)) from error
        part.chmod((folder / CONFIG).stat().st_mode)  # safetensors lets only us read


def _encoded(value: Any, place: str) -> Any:
    """The value as JSON; ConfigError with its place if it is more."""
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == TUPLE]
        if wrong:
            _refuse(f"the key {wrong[0]!r:.80} in {place}")
        return {key: _encoded(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{place}[{i}]") for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    is_plain = value is None or type(value) in (bool, int, float, str)
    if not is_plain or value in (float("inf"), -float("inf")) or value != value:
        _refuse(f"{place}={value!r:.80}")
    return value


def _refuse(what: str) -> None:
    raise ConfigError(
        f"{what} is of no type of JSON, so that {CONFIG} cannot hold it; use numbers, "
        "texts, true, false, null, lists, tuples, and dicts with keys that are texts "
        f"other than {TUPLE!r}, and train again, or share the checkpoint."
    )


def read_model_folder(folder: Path) -> dict[str, Any]:
    """Read a folder as the checkpoint that it was made of, on the CPU.

    The config becomes the text that a checkpoint has: whoever reads it applies the
    same rules, so that nothing comes from a folder that no checkpoint could bring.

    Raises:
        DataError: If a file is missing, damaged, or of another format.
    """
    content = _read_config(folder / CONFIG)
    config, space = content["config"], content["label_space"]
    meta = {key: content[key] for key in META if key in content}
    meta["cfg"] = "".join(f"{key} = {value!r}\n" for key, value in config.items())
    meta["dataset_meta"] = dict(space, classes=tuple(space["classes"]))
    return dict(meta=meta, state_dict=_read_weights(folder / WEIGHTS))


def _read_weights(path: Path) -> dict[str, Tensor]:
    _check_file(path)
    try:
        state = load_file(path)
    # An older torch lacks some of the types: AttributeError.
    except (SafetensorError, OSError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path} is not a safetensors file, or is cut off ({reason:.200}). It was "
            f"not loaded: {AGAIN}."
        ) from error
    for key, tensor in state.items():
        if tensor.dtype not in TYPES:
            raise DataError(
                f"{path}: {key!r:.80} is of type {tensor.dtype}, as no weight of damex "
                f"is; {AGAIN}."
            )
    return state


def _read_config(path: Path) -> dict[str, Any]:
    """The decoded file, its parts of the right types."""
    _check_file(path)
    try:
        content = json.loads(
            read_text(path),
            object_hook=_decoded,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path} is not the JSON file that damex card writes ({reason:.200}); "
            f"{AGAIN}."
        ) from error
    problem = _problem(content)
    if problem is not None:
        raise DataError(f"{path}: {problem}; {AGAIN}.")
    return content


def _check_file(path: Path) -> None:
    """DataError unless it is a file: a pipe would wait, a device never end."""
    if not path.is_file():
        problem = "is not a file" if path.exists() else "is missing"
        raise DataError(f"{path} {problem}; {AGAIN}.")


def _decoded(value: dict[str, Any]) -> Any:
    items = value.get(TUPLE)
    return tuple(items) if isinstance(items, list) and len(value) == 1 else value


def _finite(text: str) -> float:
    if math.isinf(float(text)):
        raise ValueError(f"{text} is too large")
    return float(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _problem(content: Any) -> str | None:
    """The first wrong type in the content, or None."""
    if not isinstance(content, dict) or "format" not in content:
        return "it has no key 'format'"
    if content["format"] != FORMAT:
        found = f"its format is {content['format']!r:.40}, this damex reads {FORMAT}"
        return f"{found} (a newer damex may read it)"
    config, space = content.get("config"), content.get("label_space")
    if not isinstance(config, dict) or not all(key.isidentifier() for key in config):
        return "its 'config' is not a dict of settings"
    if not is_label_space(space):
        return "its 'label_space' has no classes and datasets"
    if not isinstance(content.get("moe", {}), dict | None):
        return "its 'moe' is not a dict"
    return None


def is_label_space(space: Any) -> bool:
    """Whether a value has the form of `LabelSpace.to_metainfo`, as plain data."""
    if not isinstance(space, dict) or not _are_texts(space.get("classes")):
        return False
    rows = space.get("datasets")
    return (
        isinstance(rows, list | tuple)
        and len(rows) > 0
        and all(
            isinstance(row, dict)
            and _are_texts([row.get("name"), row.get("group")])
            and isinstance(row.get("classes"), dict)
            and _are_texts([*row["classes"].values()])
            and {*row["classes"].values()} <= {*space["classes"]}
            for row in rows
        )
        and len({row["name"] for row in rows}) == len(rows)
    )


def _are_texts(values: Any) -> bool:
    is_list = isinstance(values, list | tuple)
    return is_list and all(isinstance(value, str) for value in values)
