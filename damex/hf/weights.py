"""Weights of Transformers folders and of the Hugging Face hub: ``load_from="hf://..."``.

They become a checkpoint of a :class:`MoETransformersDetector`, with the names of their
classes, so that classes load by name as from any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine.runner import CheckpointLoader

from damex.errors import DataError
from damex.hf.families import plain_config, transformers, without_aliases

PREFIX = "hf://"


def read_config(name: str) -> dict[str, Any]:
    """Read the config of a folder, or of a name on the hub, as plain values.

    Raises:
        DataError: If it cannot be read.
        ConfigError: If damex does not support its family.
    """
    return plain_config(_read(transformers().AutoConfig.from_pretrained, name))


def load_from_transformers(path: str, map_location: Any = None) -> dict[str, Any]:
    """Load ``hf://NAME``, a folder or a name on the hub, as a checkpoint of damex.

    Weights are read from safetensors, never from pickles, and converted from the names
    of older versions by Transformers.
    """
    name = path.removeprefix(PREFIX)
    read_config(name)  # says in one line that a family is not supported
    kind = transformers().AutoModelForObjectDetection
    model = _read(kind.from_pretrained, name, use_safetensors=True)
    without_aliases(model)
    labels = model.config.id2label
    classes = tuple(str(labels[number]) for number in range(len(labels)))
    state = {f"detr.{key}": value for key, value in model.state_dict().items()}
    return dict(state_dict=state, meta=dict(dataset_meta=dict(classes=classes)))


def _read(reader: Callable[..., Any], name: str, **options: Any) -> Any:
    try:
        return reader(name, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{name} is no folder with a Transformers detector, and cannot be fetched "
            f"from the hub: {reason} Where no hub is reached, fetch it elsewhere, and "
            "name the folder: model.name=FOLDER."
        ) from error


CheckpointLoader.register_scheme(PREFIX, load_from_transformers, force=True)
