# DeepMoE: every channel is an expert. From the image, a shallow network predicts which
# channels of the backbone are active; inactive channels are not computed in testing.
# Paper: Wang et al., "Deep Mixture of Experts via Shallow Embedding", UAI 2019, arXiv
# 1806.01531. This is training stage 1; deepmoe_stage2.py is stage 2.
# Cost: the shallow network (2 % of the compute of the tiny DINO, 0.1 % with a
# ResNet-50) and a linear gate per convolution. Training computes all channels; testing
# skips the inactive ones.
moe = dict(
    layers=dict(backbone=[2, 3]),  # ResNet stages, counted from 0
    channels=dict(
        # (32, 64, 128, 256, 256): 1.6 % of the compute of DINO with a ResNet-50.
        embedding=dict(type="ShallowEmbedding", widths=(8, 16, 32, 64)),
        gate_init="uniform",
        # Weight of the sum over all gated channels. In the first 60 iterations of the
        # quick start, 1e-3 (the paper) closes 98 % of the channels, 1e-4 94 %, 0 80 %.
        l1_weight=1e-4,
        aux_weight=1.0,
        aux_target="classes",  # or "datasets"
    ),
)
