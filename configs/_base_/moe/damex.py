# DAMEX as the paper describes it: one expert per dataset group; a loss teaches the
# router which is whose. No token is dropped, and targets are right at any batch size;
# damex_official_code.py is the variant that the released code computes.
# Paper: Jain et al., "DAMEX: Dataset-aware Mixture-of-Experts for visual understanding
# of mixture-of-datasets", NeurIPS 2023, arXiv 2311.04894.
# Cost: FFN parameters of the chosen layers x number of experts; compute as dense plus a
# linear router (top-1).
moe = dict(
    layers=dict(decoder="even"),  # 0, 2 and 4 of DINO's six
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
