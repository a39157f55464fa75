# Two-level softmax: the router weights groups of experts, then the experts of each
# group. The probability of an expert is the product; the most probable one is used.
# Paper: Nguyen, Ho, Rinaldo, "Convergence Rates for Softmax Gating Mixture of Experts",
# 2025, arXiv 2503.03213, eq. 20.
# Cost: FFN parameters of the selected layers x number of experts; compute of a dense
# FFN and two linear routers (top-1).
moe = dict(
    layers=dict(decoder="even"),
    num_experts=8,
    router=dict(type="HierarchicalRouter", num_groups=4),
    gate=dict(type="TopKGate", k=1),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
