# pMoE in the backbone: the channels of the last 3x3 convolution in the last two ResNet
# stages are divided among experts; each convolves only its highest-scoring patches.
# Paper: Chowdhury et al., "Patch-level Routing in Mixture-of-Experts is Provably
# Sample-efficient for Convolutional Neural Networks", ICML 2023, arXiv 2306.04073.
# Cost: parameters of the dense backbone and a linear router; an eighth of the compute
# of these convolutions (8 experts, each an eighth of the channels and of the patches).
moe = dict(
    layers=dict(backbone=[2, 3]),  # counted from 0; earlier stages are dense
    num_experts=8,
    router=dict(type="LinearRouter", init_std=0.0001),
    gate=dict(type="ExpertChoiceGate", share=0.125, mean_one=True),
    experts=dict(type="PatchConvExperts", patch_size=2, border="neighbours"),
)
