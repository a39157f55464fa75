"""Dataset-aware mixture-of-experts detectors for MMDetection.

Importing ``damex`` or ``damex.moe`` touches nothing else. Importing ``damex.registry``
makes sure that mmdet can be imported and adds damex's datasets, detectors and hooks to
its registries (configs do it by ``custom_imports``).
"""

# A plain text, which a build reads without importing anything.
__version__ = "0.1.0"

__all__ = ["__version__"]
