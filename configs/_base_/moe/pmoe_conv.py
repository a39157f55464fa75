# pMoE in the backbone: the last 3x3 convolution of the last two stages of a ResNet is
# shared out among experts, and each convolves only the patches it scores highest.
# Paper: Chowdhury et al., "Patch-level Routing in Mixture-of-Experts is Provably
# Sample-efficient for Convolutional Neural Networks", ICML 2023, arXiv 2306.04073.
# Cost: parameters as dense plus a linear router; an eighth of the compute of these
# convolutions, as each of 8 experts has an eighth of the channels and of the patches.
moe = dict(
    layers=dict(backbone=[2, 3]),  # counted from 0; the earlier stages stay dense
    num_experts=8,
    router=dict(type="LinearRouter", init_std=0.0001),
    gate=dict(type="ExpertChoiceGate", share=0.125, mean_one=True),
    experts=dict(type="PatchConvExperts", patch_size=2, border="neighbours"),
)
