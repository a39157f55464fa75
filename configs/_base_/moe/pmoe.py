# pMoE: in each image, every expert selects the encoder tokens with its highest scores,
# so load is balanced without a loss. Tokens that no expert selects skip the FFN.
# Paper: Chowdhury et al., "Patch-level Routing in Mixture-of-Experts is Provably
# Sample-efficient for Convolutional Neural Networks", ICML 2023, arXiv 2306.04073.
# In the paper the weights of an expert sum to 1 before pooling. Here they scale the
# residual of each token, so they are normalized to a mean of 1 (mean_one).
# Cost: FFN parameters of the selected layers x 8; compute of a dense FFN (8 experts,
# each on an eighth of the tokens) and a linear router.
moe = dict(
    layers=dict(encoder="even"),
    num_experts=8,
    router=dict(type="LinearRouter"),
    gate=dict(type="ExpertChoiceGate", share=0.125, mean_one=True),
    experts=dict(type="FFNExperts"),
)
