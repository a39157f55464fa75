"""Weights of Transformers folders and of the Hugging Face hub: ``load_from="hf://..."``.

They become a checkpoint of a :class:`MoETransformersDetector`, with the names of their
classes, so that classes load by name as from any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine.runner import CheckpointLoader

from damex.errors import ConfigError, DataError
from damex.hf.families import FAMILIES, full_config, plain_config, transformers

PREFIX = "hf://"


def read_config(name: str) -> dict[str, Any]:
    """Read the config of a folder, or of a name on the hub, as plain values.

    Raises:
        DataError: If it cannot be read.
        ConfigError: If damex does not support its family.
    """
    return _read(lambda one, **_: plain_config(_values_of(one)), name)


def load_from_transformers(path: str, map_location: Any = None) -> dict[str, Any]:
    """Load ``hf://NAME``, a folder or a name on the hub, as a checkpoint of damex.

    Weights are read from safetensors, never from pickles, and converted from the names
    of older versions by Transformers. Of the config, only plain values are used: others
    could name kernels or repositories to fetch.

    Raises:
        DataError: If the files cannot be read, or weights are missing.
        ConfigError: If damex does not support the family.
    """
    name = path.removeprefix(PREFIX)
    plain = read_config(name)  # says in one line that a family is not supported
    names = _values_of(name).get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    labels = {int(number): str(label) for number, label in names.items()}
    classes = tuple(labels.get(n, f"LABEL_{n}") for n in range(len(labels)))
    model, report = _read(
        transformers().AutoModelForObjectDetection.from_pretrained,
        name,
        config=full_config(plain, len(classes)),
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = {m for m in report["missing_keys"] if not m.endswith("_batches_tracked")}
    if missing:
        raise DataError(
            f"{name}: {len(missing)} weights are missing, such as {min(missing)}; "
            "fetch the folder again."
        )
    FAMILIES[model.config.model_type].tidy(model)
    state = {f"detr.{key}": value for key, value in model.state_dict().items()}
    return dict(state_dict=state, meta=dict(dataset_meta=dict(classes=classes)))


def _values_of(name: str) -> dict[str, Any]:
    """Return the content of ``config.json``; ValueError if there is none."""
    values, _ = transformers().PreTrainedConfig.get_config_dict(name)
    if "model_type" not in values:
        raise ValueError("config.json with a model_type was not found.")
    return values


def _read(reader: Callable[..., Any], name: str, **options: Any) -> Any:
    try:
        return reader(name, trust_remote_code=False, **options)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file raises many types
        reason = " ".join(str(error).split())
        raise DataError(
            f"{name} is no folder with a Transformers detector, or is damaged, and "
            f"cannot be fetched from the hub: {reason} Where no hub is reached, fetch "
            "it elsewhere, and name the folder: model.name=FOLDER."
        ) from error


CheckpointLoader.register_scheme(PREFIX, load_from_transformers, force=True)
