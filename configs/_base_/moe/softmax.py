# Dense MoE: every token is processed by all experts, weighted by the softmax of the
# router. Smooth and without unused experts; the reference that sparse gates
# approximate.
# Paper: Nguyen, Ho, Rinaldo, "Convergence Rates for Softmax Gating Mixture of Experts",
# 2025, arXiv 2503.03213, eq. 2.
# Cost: FFN parameters and FFN compute of the selected layers x number of experts.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter", bias=True),
    gate=dict(type="DenseSoftmaxGate"),
    experts=dict(type="FFNExperts"),
)
