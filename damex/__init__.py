"""Dataset-aware mixture-of-experts detectors for MMDetection.

::

    import damex
    run = damex.train({"fish": "data/fish", "boards": "data/boards"}, epochs=4)
    detector = damex.load(run.checkpoint)

Importing ``damex`` or ``damex.moe`` has no side effects. Importing ``damex.registry``
makes mmdet importable and registers damex's datasets, detectors and hooks (configs do
so by ``custom_imports``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from damex.workbench.api import Detector, Evaluation, TrainedRun, load, train

# A literal, which the build reads without importing anything.
__version__ = "0.1.0"

__all__ = ["Detector", "Evaluation", "TrainedRun", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import the API when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from damex.workbench import api

    return getattr(api, name)
