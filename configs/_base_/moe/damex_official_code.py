# DAMEX as implemented in the released code, for comparison only; damex.py follows the
# paper and is recommended. Once the router is accurate, capacity drops most queries,
# and with several images per device, results depend on the other images of the batch.
# Not reproduced: routing targets that are wrong for more than one image per device, and
# label ids that collide between datasets. Attention in these layers is initialized as
# in MMDetection instead of with std 0.005.
# Paper: Jain et al., "DAMEX: Dataset-aware Mixture-of-Experts for visual understanding
# of mixture-of-datasets", NeurIPS 2023, arXiv 2311.04894.
# Cost: FFN parameters of the selected layers x number of experts; compute of a dense
# FFN or less (top-1, dropped tokens are free) and a linear router.
moe = dict(
    layers=dict(decoder="even"),  # as in damex.py
    num_experts=None,  # the number of dataset groups; 8, one per GPU, in that code
    router=dict(type="LinearRouter", init_std=0.005),  # damex.py: 0.02
    gate=dict(
        type="TopKGate",
        k=1,
        noise="gaussian",
        noisy_weights=True,  # damex.py: noise affects the choice, not the weights
        # damex.py: no tokens are dropped
        capacity=dict(type="ExpertCapacity", factor=1.25),
    ),
    experts=dict(
        type="FFNExperts",
        activation="gelu",  # damex.py: as the dense FFN (ReLU)
        dropout=0.0,
        init_std=0.005,  # damex.py: Xavier, as in DETR
        output_bias=False,  # damex.py: learned
    ),
    # damex.py: norm(x + MoE(x)) without drop path, as in DETR
    block=dict(norm="pre", drop_path=0.2),
    # All decoder tokens including denoising queries, as in damex.py.
    losses=[dict(type="DatasetRoutingLoss", weight=0.1, tokens="all")],
)
