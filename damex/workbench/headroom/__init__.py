"""``damex headroom``: how much experts could gain on a mixture of datasets."""

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
