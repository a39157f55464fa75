# DAMEX that starts dense: every expert learns from all datasets at first; as the
# temperature falls, the dataset loss decides which expert keeps whose tokens.
# Papers: Jain et al., NeurIPS 2023, arXiv 2311.04894; Nie et al., "EvoMoE", 2021, arXiv
# 2112.14397; Nguyen, Ho, Rinaldo 2025, arXiv 2503.03213, eq. 17.
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
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
