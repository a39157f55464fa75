# DAMEX with a small part per dataset group: all tokens share the dense FFN, and the
# expert of their dataset adds a linear map of low rank, zero at the start. The detector
# starts exactly equal to the dense one, from random weights and from a trained dense
# detector (load_from). AffineExperts (no rank) are cheaper still: a scale and a shift.
# Papers: Zhou et al., "MoLA", ICML 2024, arXiv 2406.09679; Hu et al., "LoRA", 2021,
# arXiv 2106.09685; Jain et al., "DAMEX", NeurIPS 2023, arXiv 2311.04894 (the loss).
# Cost: 2 x channels x rank parameters per expert and layer; compute as dense plus twice
# that per token and a linear router.
moe = dict(
    layers=dict(encoder="all", decoder="all"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, renormalize=True, noise="gaussian"),  # weight 1
    experts=dict(type="LowRankExperts", rank=16),
    shared_expert=dict(type="SharedExpert"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
