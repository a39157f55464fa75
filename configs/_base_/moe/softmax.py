# Dense mixture: every token goes to every expert, weighted by the router's softmax;
# smooth, without unused experts, and the reference that sparse gates approximate.
# Paper: Nguyen, Ho, Rinaldo, "Convergence Rates for Softmax Gating Mixture of Experts",
# 2025, arXiv 2503.03213, eq. 2.
# Cost: FFN parameters and FFN compute of the chosen layers x number of experts.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter", bias=True),
    gate=dict(type="DenseSoftmaxGate"),
    experts=dict(type="FFNExperts"),
)
