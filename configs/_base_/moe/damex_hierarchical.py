# DAMEX with several experts per dataset group: the dataset loss teaches which group a
# token goes to, and the second level divides the group's tokens as the task asks.
# Papers: Jain et al., NeurIPS 2023, arXiv 2311.04894; Nguyen, Ho, Rinaldo 2025, arXiv
# 2503.03213, eq. 20.
# Cost: FFN parameters of the chosen layers x number of experts; compute as dense plus
# two linear routers (top-1).
moe = dict(
    layers=dict(decoder="even"),
    num_experts=8,  # a multiple of the number of dataset groups shares them evenly
    router=dict(type="HierarchicalRouter"),  # groups: those of the mixture
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    experts=dict(type="FFNExperts"),
    losses=[
        dict(type="DatasetRoutingLoss", weight=0.1),
        dict(type="LoadBalanceLoss", weight=0.01),  # against unused experts
    ],
)
