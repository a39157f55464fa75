# Sparse MoE with a cosine router: routing depends only on the direction of a token, not
# on the magnitude of its activations. The temperature is learned.
# Papers: Li et al., "Sparse Mixture-of-Experts are Domain Generalizable Learners", ICLR
# 2023, arXiv 2206.04046; SM3Det, AAAI 2026, arXiv 2412.20665 (top-2 of 8, on grid cells
# of the backbone).
# Cost: FFN parameters of the selected layers x number of experts; compute of two dense
# FFNs (top-2), a projection and the router.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=8,
    router=dict(type="CosineRouter", proj_dims=128),
    gate=dict(type="TopKGate", k=2),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
