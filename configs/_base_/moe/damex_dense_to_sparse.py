# DAMEX with a dense start: all experts are first trained on all datasets; as the
# temperature decreases, the dataset loss assigns each dataset's tokens to an expert.
# Papers: Jain et al., NeurIPS 2023, arXiv 2311.04894; Nie et al., "EvoMoE", 2021, arXiv
# 2112.14397; Nguyen, Ho, Rinaldo 2025, arXiv 2503.03213, eq. 17.
# Cost: FFN parameters of the selected layers x number of experts; compute of all
# experts at the start, of about one at the end.
_base_ = ["./dense_to_sparse.py"]
moe = dict(losses=[dict(type="DatasetRoutingLoss", weight=0.1)])
