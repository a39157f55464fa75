# Normalised gradient descent for the experts: each one that got tokens moves by the
# same length, however few they were; AdamW trains the rest.
# Paper: Chen et al., "Towards Understanding Mixture of Experts in Deep Learning",
# NeurIPS 2022, arXiv 2208.02813, Algorithm 1.
# Cost: as adamw_tiny.py, without AdamW's two moments for the experts.
_base_ = ["./adamw_tiny.py"]
optim_wrapper = dict(
    constructor="ExpertOptimWrapperConstructor",
    experts=dict(type="NormalizedGD", lr=0.05),  # length of a step; see the schedule
)
