"""Runner, hooks and checkpoints around mmengine."""

from damex.compat import import_mmdet

import_mmdet()
