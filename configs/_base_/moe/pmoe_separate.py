# pMoE with a router that is trained first: for a tenth of the training only the routers
# learn, to part the patches of the dataset groups; then they are frozen.
# Paper: Chowdhury et al., "Patch-level Routing in Mixture-of-Experts is Provably
# Sample-efficient for Convolutional Neural Networks", ICML 2023, arXiv 2306.04073,
# eq. 6.
# Cost: as pmoe_conv.py; the steps of the first tenth have no backward pass to speak of.
# Several processes: MixtureRunner sets the find_unused_parameters=True that this needs.
moe = dict(
    layers=dict(backbone=[2, 3]),
    num_experts=8,
    router=dict(type="LinearRouter"),
    gate=dict(type="ExpertChoiceGate", share=0.125, weights="one"),
    experts=dict(type="PatchConvExperts", patch_size=2, border="neighbours"),
    losses=[dict(type="SeparateRouterLoss")],
    router_warmup=dict(share=0.1),
)
