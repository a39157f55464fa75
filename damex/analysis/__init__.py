"""What a detector costs, and how mixtures of experts compare over seeds."""

from damex.compat import ensure_ops

ensure_ops()
