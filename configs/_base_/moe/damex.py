# DAMEX as described in the paper: one expert per dataset group, and a loss that trains
# the router to send tokens to the expert of their dataset. No tokens are dropped, and
# routing targets are correct for any batch size; see damex_official_code.py for the
# variant of the released code.
# Paper: Jain et al., "DAMEX: Dataset-aware Mixture-of-Experts for visual understanding
# of mixture-of-datasets", NeurIPS 2023, arXiv 2311.04894.
# Cost: FFN parameters of the selected layers x number of experts; compute of a dense
# FFN and a linear router (top-1).
moe = dict(
    layers=dict(decoder="even"),  # layers 0, 2 and 4 of 6
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
