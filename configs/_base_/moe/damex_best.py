# The recipe of damex: one expert per dataset group in all layers of encoder and
# decoder. In training every token goes to the expert of its dataset while the routers
# learn to tell datasets apart; in use the tokens of an image vote on its dataset.
# Paper: Jain et al., NeurIPS 2023, arXiv 2311.04894; what the recipe adds to it, and
# what each part brings, is in docs/experts-results.md.
# Cost: FFN parameters of the chosen layers x number of experts; compute as dense plus a
# linear router (top-1).
moe = dict(
    layers=dict(encoder="all", decoder="all"),
    num_experts=None,  # the number of dataset groups
    router=dict(type="LinearRouter"),
    # Weights of 1: from a dense checkpoint the detector starts equal to it.
    gate=dict(type="TopKGate", k=1, noise="gaussian", renormalize=True),
    experts=dict(type="FFNExperts"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    teacher_forcing=True,
    image_vote=True,
)
