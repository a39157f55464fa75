"""What a detector costs, and how mixtures of experts compare over seeds."""

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
