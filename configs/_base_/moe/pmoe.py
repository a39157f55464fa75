# pMoE: in every image each expert takes the encoder tokens it scores highest, so the
# load is balanced without a loss; tokens that no expert takes skip the FFN.
# Paper: Chowdhury et al., "Patch-level Routing in Mixture-of-Experts is Provably
# Sample-efficient for Convolutional Neural Networks", ICML 2023, arXiv 2306.04073.
# The paper's weights sum to one per expert, below a pooled sum. Here they scale what is
# added to each token, so their mean is one (mean_one).
# Cost: FFN parameters of the chosen layers x 8; compute of the FFN as dense (8 experts
# on an eighth of the tokens each) plus a linear router.
moe = dict(
    layers=dict(encoder="even"),
    num_experts=8,
    router=dict(type="LinearRouter"),
    gate=dict(type="ExpertChoiceGate", share=0.125, mean_one=True),
    experts=dict(type="FFNExperts"),
)
