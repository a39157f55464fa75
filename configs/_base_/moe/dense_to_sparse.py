# Dense to sparse: all experts learn from all tokens at first; the temperature of the
# softmax then falls with training progress, and experts of small weight are dropped.
# Papers: Nie et al., "EvoMoE", 2021, arXiv 2112.14397; Nguyen, Ho, Rinaldo 2025, arXiv
# 2503.03213, eq. 12 and 17 (with a non-linear router, as here).
# Cost: FFN parameters of the chosen layers x number of experts; compute that of all
# experts at the start and near that of one at the end.
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
    # Acts once weights are dropped: until then each expert has the same load.
    losses=[dict(type="LoadBalanceLoss", weight=0.01)],
)
