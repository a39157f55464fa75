# Fine-grained experts: a dense FFN is cut into parts, the cut FFN is copied, and every
# token takes as many experts as there are parts. The detector starts exactly equal to
# the dense one, so start it from a trained dense detector (load_from).
# Paper: Lu et al., "Dynamic-DINO: Fine-Grained Mixture of Experts Tuning for Real-time
# Open-Vocabulary Object Detection", ICCV 2025, arXiv 2507.17436.
# Cost: FFN parameters of the chosen layers x copies; compute as dense plus a linear
# router.
moe = dict(
    layers=dict(decoder="all"),
    fine_grained=dict(parts=2, copies=8),  # 16 experts of half the width, top-2
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate"),  # k, renormalize and weight_scale follow from the parts
    experts=dict(type="FFNExperts"),
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
