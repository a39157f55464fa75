# The recipe of damex: all tokens share the dense FFN, and the expert of their dataset
# group adds a linear map of low rank, in all layers of encoder and decoder. In training
# every token goes to the expert of its dataset while the routers learn to tell datasets
# apart; in use the tokens of an image vote on its dataset. The maps are zero at first:
# the detector starts exactly equal to the dense one, from random weights and from a
# trained dense detector (load_from).
# Papers: Jain et al., "DAMEX", NeurIPS 2023, arXiv 2311.04894 (the loss); Zhou et al.,
# "MoLA", ICML 2024, arXiv 2406.09679, and Hu et al., "LoRA", 2021, arXiv 2106.09685
# (the maps). Measurements: docs/research/results.md.
# Cost: an eighth of channels x channels parameters per expert and layer; compute as
# dense plus one such map per token and a linear router.
moe = dict(
    layers=dict(encoder="all", decoder="all"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    gate=dict(type="TopKGate", k=1, renormalize=True),  # weight 1
    experts=dict(type="LowRankExperts"),  # rank: a sixteenth of the channels
    shared_expert=dict(type="SharedExpert"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    teacher_forcing=True,
    image_vote=True,
)
