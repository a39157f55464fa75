# DeepMoE: every channel is an expert. A shallow network looks at the image and opens
# the channels of the backbone that it needs; closed ones are not computed when testing.
# Paper: Wang et al., "Deep Mixture of Experts via Shallow Embedding", UAI 2019, arXiv
# 1806.01531. Stage 1 of its training; deepmoe_stage2.py is stage 2.
# Cost: the shallow network (2 % of the compute of the tiny DINO, 0.1 % with a
# ResNet-50) and a linear gate per convolution. Compute is as dense when training, and
# less by the closed channels when testing.
moe = dict(
    layers=dict(backbone=[2, 3]),  # stages of the ResNet, from 0
    channels=dict(
        # (32, 64, 128, 256, 256) is 1.6 % of the DINO with a ResNet-50.
        embedding=dict(type="ShallowEmbedding", widths=(8, 16, 32, 64)),
        gate_init="uniform",
        # Of the sum over all gated channels; the paper's 1e-3 shuts 98 % of them in the
        # first 60 iterations of the quick start, this 94 %, 0 still 80 %.
        l1_weight=1e-4,
        aux_weight=1.0,
        aux_target="classes",  # or 'datasets'
    ),
)
