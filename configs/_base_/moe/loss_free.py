# Loss-free balancing: a bias on the choice of experts follows their load, so that no
# balancing loss pulls at the router; a shared expert holds what all datasets need.
# Papers: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
# Mixture-of-Experts", 2024, arXiv 2408.15664; DeepSeekMoE, 2024, arXiv 2401.06066.
# Cost: FFN parameters of the chosen layers x (number of experts + 1); compute twice the
# dense FFN (top-1 and the shared expert) plus a linear router.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, balance=dict(type="BiasBalancer", rate=0.001)),
    experts=dict(type="FFNExperts"),
    shared_expert=dict(type="SharedExpert"),
)
