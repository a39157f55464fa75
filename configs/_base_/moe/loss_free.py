# Loss-free balancing: a bias added to the routing scores is adjusted to the load of the
# experts, instead of a balancing loss. A shared expert processes all tokens.
# Papers: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
# Mixture-of-Experts", 2024, arXiv 2408.15664; DeepSeekMoE, 2024, arXiv 2401.06066.
# Cost: FFN parameters of the selected layers x (number of experts + 1); compute of two
# dense FFNs (top-1 and the shared expert) and a linear router.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, balance=dict(type="BiasBalancer", rate=0.001)),
    experts=dict(type="FFNExperts"),
    shared_expert=dict(type="SharedExpert"),
)
