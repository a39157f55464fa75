# DAMEX that starts dense: every expert learns from all datasets at first; as the
# temperature falls, the dataset loss decides which expert keeps whose tokens.
# Papers: Jain et al., NeurIPS 2023, arXiv 2311.04894; Nie et al., "EvoMoE", 2021, arXiv
# 2112.14397; Nguyen, Ho, Rinaldo 2025, arXiv 2503.03213, eq. 17.
# Cost: FFN parameters of the chosen layers x number of experts; compute that of all
# experts at the start and near that of one at the end.
_base_ = ["./dense_to_sparse.py"]
moe = dict(losses=[dict(type="DatasetRoutingLoss", weight=0.1)])
