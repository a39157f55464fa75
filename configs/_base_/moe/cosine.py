# Sparse MoE with a cosine router: only the direction of a token counts, so that no
# dataset's larger activations pull the router; the temperature is learned.
# Papers: Li et al., "Sparse Mixture-of-Experts are Domain Generalizable Learners", ICLR
# 2023, arXiv 2206.04046; SM3Det, AAAI 2026, arXiv 2412.20665 (top-2 of 8, on grid cells
# of the backbone there).
# Cost: FFN parameters of the chosen layers x number of experts; compute twice the dense
# FFN (top-2) plus a projection and the router.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=8,
    router=dict(type="CosineRouter", proj_dims=128),
    gate=dict(type="TopKGate", k=2),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
