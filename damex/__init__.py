"""Dataset-aware mixture-of-experts detectors for MMDetection.

Importing ``damex`` only makes sure that mmdet can be imported; importing
``damex.registry`` adds damex's datasets, detectors and hooks to mmdet's registries
(configs do it by ``custom_imports``).
"""

from damex.compat import ensure_ops
from damex.version import __version__

ensure_ops()

__all__ = ["__version__"]
