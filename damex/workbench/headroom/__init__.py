"""``damex headroom``: how much experts could gain on a mixture of datasets."""
