# DAMEX as its released code computes it (damex.py is DAMEX as the paper describes it):
# to compare with the released code, not the better choice. Most queries are dropped
# once the router is good, and with more than one image per device an image's result
# depends on the others of its batch. Left out are the code's faults: routing targets
# that are wrong beyond one image per device, labels that collide between datasets. Also
# different: attention of these layers starts as in mmdet, not from std 0.005.
# Paper: Jain et al., "DAMEX: Dataset-aware Mixture-of-Experts for visual understanding
# of mixture-of-datasets", NeurIPS 2023, arXiv 2311.04894.
# Cost: FFN parameters of the chosen layers x number of experts; compute of the FFN as
# dense or less (top-1, dropped tokens cost nothing) plus a linear router.
moe = dict(
    layers=dict(decoder="even"),  # as in damex.py
    num_experts=None,  # the number of dataset groups; there one per GPU, so 8
    router=dict(type="LinearRouter", init_std=0.005),  # damex.py: 0.02
    gate=dict(
        type="TopKGate",
        k=1,
        noise="gaussian",
        noisy_weights=True,  # damex.py: noise moves the choice and no weight
        # damex.py: no token is ever dropped
        capacity=dict(type="ExpertCapacity", factor=1.25),
    ),
    experts=dict(
        type="FFNExperts",
        activation="gelu",  # damex.py: that of the dense FFN, ReLU
        dropout=0.0,
        init_std=0.005,  # damex.py: Xavier, as DETR's FFNs
        output_bias=False,  # damex.py: learned
    ),
    # damex.py: norm(x + MoE(x)) and no drop path, as DETR's layers
    block=dict(norm="pre", drop_path=0.2),
    # All decoder tokens, denoising ones included, as in damex.py.
    losses=[dict(type="DatasetRoutingLoss", weight=0.1, tokens="all")],
)
