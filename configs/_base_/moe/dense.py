# No experts: the plain joint model that every mixture of experts has to beat.
moe = None
