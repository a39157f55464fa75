"""Using a checkpoint: a detector read as data, and its predictions.

::

    from damex.inference import Predictor
    predictor = Predictor("epoch_3.pth")
    predictions = predictor(["photo.jpg"])
"""

from typing import TYPE_CHECKING, Any

from damex.compat import ensure_ops

if TYPE_CHECKING:
    from damex.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]

ensure_ops()


def __getattr__(name: str) -> Any:
    """Import the predictor when it is used: modules for drawing need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from damex.inference import predictor

    return getattr(predictor, name)
