# pMoE with separately trained routers: for the first tenth of the training, only the
# routers are trained, to separate the patches of the dataset groups; then they are
# frozen.
# Paper: Chowdhury et al., "Patch-level Routing in Mixture-of-Experts is Provably
# Sample-efficient for Convolutional Neural Networks", ICML 2023, arXiv 2306.04073,
# eq. 6.
# Cost: as pmoe_conv.py; the first tenth needs almost no backward pass.
# Distributed training: MixtureRunner sets find_unused_parameters=True, as required.
moe = dict(
    layers=dict(backbone=[2, 3]),
    num_experts=8,
    router=dict(type="LinearRouter"),
    gate=dict(type="ExpertChoiceGate", share=0.125, weights="one"),
    experts=dict(type="PatchConvExperts", patch_size=2, border="neighbours"),
    losses=[dict(type="SeparateRouterLoss")],
    router_warmup=dict(share=0.1),
)
