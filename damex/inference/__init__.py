"""Using a checkpoint: a detector read as data, and its predictions."""

from damex.compat import ensure_ops

ensure_ops()
