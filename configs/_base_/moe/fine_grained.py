# Fine-grained experts: the dense FFN is split into parts, the parts are copied, and
# each token is routed to as many experts as there are parts. At the start the detector
# equals the dense one, so start from a dense checkpoint (load_from).
# Paper: Lu et al., "Dynamic-DINO: Fine-Grained Mixture of Experts Tuning for Real-time
# Open-Vocabulary Object Detection", ICCV 2025, arXiv 2507.17436.
# Cost: FFN parameters of the selected layers x copies; compute of a dense FFN and a
# linear router.
moe = dict(
    layers=dict(decoder="all"),
    fine_grained=dict(parts=2, copies=8),  # 16 experts of half the width, top-2
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate"),  # k, renormalize and weight_scale are set from `parts`
    experts=dict(type="FFNExperts"),
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
