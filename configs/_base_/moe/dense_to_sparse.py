# Dense to sparse: all experts are first trained on all tokens. The softmax temperature
# then decreases during training, and experts with small weights are dropped.
# Papers: Nie et al., "EvoMoE", 2021, arXiv 2112.14397; Nguyen, Ho, Rinaldo 2025, arXiv
# 2503.03213, eq. 12 and 17 (also with a non-linear router).
# Cost: FFN parameters of the selected layers x number of experts; compute of all
# experts at the start, of about one at the end.
moe = dict(
    layers=dict(decoder="even"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="MLPRouter", activation="tanh"),
    gate=dict(
        type="DenseToSparseGate",
        start_temperature=2.0,
        end_temperature=0.1,
        threshold=0.01,
    ),
    experts=dict(type="FFNExperts"),
    # No effect until weights are dropped: before, all experts have equal load.
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
