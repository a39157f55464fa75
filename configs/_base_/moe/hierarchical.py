# Two-level softmax: the router first weighs groups of experts, then the experts of each
# group; the probability of an expert is the product, and the best expert is taken.
# Paper: Nguyen, Ho, Rinaldo, "Convergence Rates for Softmax Gating Mixture of Experts",
# 2025, arXiv 2503.03213, eq. 20.
# Cost: FFN parameters of the chosen layers x number of experts; compute as dense plus
# two linear routers (top-1).
moe = dict(
    layers=dict(decoder="even"),
    num_experts=8,
    router=dict(type="HierarchicalRouter", num_groups=4),
    gate=dict(type="TopKGate", k=1),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
