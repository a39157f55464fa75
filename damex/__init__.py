"""Dataset-aware mixture-of-experts detectors for MMDetection.

Importing ``damex`` or ``damex.moe`` has no side effects. Importing ``damex.registry``
makes mmdet importable and registers damex's datasets, detectors and hooks (configs do
so by ``custom_imports``).
"""

# A literal, which the build reads without importing anything.
__version__ = "0.1.0"

__all__ = ["__version__"]
