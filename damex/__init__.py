"""Dataset-aware mixture-of-experts detectors for MMDetection.

Importing ``damex`` only makes sure that mmdet can be imported; importing
``damex.registry`` adds damex's datasets, detectors and hooks to mmdet's registries
(configs do it by ``custom_imports``).
"""

from damex.compat import ensure_ops

# A plain text, which a build reads without importing anything.
__version__ = "0.1.0"

ensure_ops()

__all__ = ["__version__"]
