# The recipe of damex: dense for the first 30 % of a training, then experts in all
# layers of encoder and decoder that start as copies of the dense FFNs. In training every
# token goes to an expert of its dataset while the routers learn to tell datasets apart;
# in use the tokens of an image vote on its dataset. See docs/experts-results.md.
# Papers: Jain et al., NeurIPS 2023, arXiv 2311.04894; Komatsuzaki et al. 2023, arXiv
# 2212.05055.
# Cost: FFN parameters of the chosen layers x number of experts; compute as dense plus a
# linear router (top-1).
moe = dict(
    layers=dict(encoder="all", decoder="all"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    # Weights of 1: at the switch the detector answers as the dense one did.
    gate=dict(type="TopKGate", k=1, noise="gaussian", renormalize=True),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    upcycling=dict(share=0.3),
    teacher_forcing=True,
    image_vote=True,
)
