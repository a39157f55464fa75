# DeepMoE: every channel is an expert. A shallow network looks at the image and opens
# the channels of the backbone that it needs; closed ones are not computed when testing.
# Paper: Wang et al., "Deep Mixture of Experts via Shallow Embedding", UAI 2019, arXiv
# 1806.01531.
# Cost: the shallow network and one linear gate per convolution; compute when training
# as dense plus the shallow network, when testing less by the channels that are closed.
# Stage 2 of the paper's training, with frozen gates: deepmoe_stage2.py.
moe = dict(
    layers=dict(backbone=[2, 3]),  # stages of the ResNet, from 0; half of its compute
    channels=dict(
        embedding=dict(type="ShallowEmbedding", widths=(16, 32, 64, 128)),
        gate_init="uniform",
        l1_weight=1e-3,  # of the sum over all gated channels
        aux_weight=1.0,
        aux_target="classes",  # or 'datasets'
    ),
)
