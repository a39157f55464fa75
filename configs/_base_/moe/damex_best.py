# The default recipe of damex. All tokens share the dense FFN, and the expert of their
# dataset group adds a low-rank linear map, in all encoder and decoder layers. Training
# routes each token to the expert of its dataset, while the routers learn to predict the
# dataset; at inference the tokens of an image vote for its dataset. The maps are
# initialized to zero: at the start the detector equals the dense one, whether trained
# from scratch or from a dense checkpoint (load_from).
# Papers: Jain et al., "DAMEX", NeurIPS 2023, arXiv 2311.04894 (the loss); Zhou et al.,
# "MoLA", ICML 2024, arXiv 2406.09679, and Hu et al., "LoRA", 2021, arXiv 2106.09685
# (the maps). Results: docs/research/results.md.
# Cost: channels x channels / 8 parameters per expert and layer; compute of a dense FFN,
# one low-rank map per token and a linear router.
moe = dict(
    layers=dict(encoder="all", decoder="all"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, renormalize=True),  # weight 1
    experts=dict(type="LowRankExperts"),  # rank: channels / 16
    shared_expert=dict(type="SharedExpert"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    teacher_forcing=True,
    image_vote=True,
)
