"""Runner, hooks and checkpoints around mmengine."""

from damex.compat import ensure_ops

ensure_ops()
