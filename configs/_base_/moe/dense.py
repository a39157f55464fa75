# No experts: the dense baseline trained jointly on all datasets.
moe = None
