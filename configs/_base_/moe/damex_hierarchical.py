# DAMEX with several experts per dataset group: the dataset loss trains the choice of
# the group, the detection loss the choice of the expert within it.
# Papers: Jain et al., NeurIPS 2023, arXiv 2311.04894; Nguyen, Ho, Rinaldo 2025, arXiv
# 2503.03213, eq. 20.
# Cost: FFN parameters of the selected layers x number of experts; compute of a dense
# FFN and two linear routers (top-1).
moe = dict(
    layers=dict(decoder="even"),
    num_experts=8,  # equal groups if a multiple of the number of dataset groups
    router=dict(type="HierarchicalRouter"),  # one group per dataset group
    gate=dict(type="TopKGate", k=1, noise="gaussian"),
    experts=dict(type="FFNExperts"),
    losses=[
        dict(type="DatasetRoutingLoss", weight=0.1),
        dict(type="LoadBalanceLoss", weight=0.01),  # prevents unused experts
    ],
)
