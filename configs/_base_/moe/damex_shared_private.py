# DAMEX at the compute of a dense FFN, with most of it shared: three quarters of the
# hidden units see all tokens, and the last quarter is copied, each dataset group with
# copies of its own. The detector starts exactly equal to the dense one, from random
# weights and from a trained dense detector (load_from).
# Papers: DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066 (shared experts); Lu et al.,
# "Dynamic-DINO", ICCV 2025, arXiv 2507.17436 (the cut); Jain et al., "DAMEX", NeurIPS
# 2023, arXiv 2311.04894 (the loss).
# Cost: FFN parameters of the chosen layers x (3 + copies) / 4; compute as dense plus
# two linear routers.
moe = dict(
    layers=dict(decoder="all"),
    fine_grained=dict(parts=4, shared=3, copies=8),  # 8 experts of a quarter, top-1
    router=dict(type="HierarchicalRouter"),  # groups: those of the mixture
    gate=dict(type="TopKGate"),  # k, renormalize and weight_scale follow from the parts
    experts=dict(type="FFNExperts"),
    losses=[
        dict(type="DatasetRoutingLoss", weight=0.1),
        dict(type="LoadBalanceLoss", weight=0.01),  # against unused copies
    ],
)
