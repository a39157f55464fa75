# DAMEX at the compute of a dense FFN, mostly shared: three quarters of the hidden units
# process all tokens; the last quarter is copied, and each dataset group has separate
# copies. At the start the detector equals the dense one, whether trained from scratch
# or from a dense checkpoint (load_from).
# Papers: DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066 (shared experts); Lu et al.,
# "Dynamic-DINO", ICCV 2025, arXiv 2507.17436 (splitting FFNs); Jain et al., "DAMEX",
# NeurIPS 2023, arXiv 2311.04894 (the loss).
# Cost: FFN parameters of the selected layers x (3 + copies) / 4; compute of a dense FFN
# and two linear routers.
moe = dict(
    layers=dict(decoder="all"),
    fine_grained=dict(parts=4, shared=3, copies=8),  # 8 quarter experts, top-1
    router=dict(type="HierarchicalRouter"),  # one group per dataset group
    gate=dict(type="TopKGate"),  # k, renormalize and weight_scale are set from `parts`
    experts=dict(type="FFNExperts"),
    losses=[
        dict(type="DatasetRoutingLoss", weight=0.1),
        dict(type="LoadBalanceLoss", weight=0.01),  # prevents unused copies
    ],
)
