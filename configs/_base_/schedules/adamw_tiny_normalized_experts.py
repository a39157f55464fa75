# Normalized gradient descent for experts: all experts that received tokens take a step
# of equal length, regardless of their load. AdamW trains all other parameters.
# Paper: Chen et al., "Towards Understanding Mixture of Experts in Deep Learning",
# NeurIPS 2022, arXiv 2208.02813, Algorithm 1.
# Cost: as adamw_tiny.py, without AdamW's two moments for the experts.
_base_ = ["./adamw_tiny.py"]
optim_wrapper = dict(
    constructor="ExpertOptimWrapperConstructor",
    experts=dict(type="NormalizedGD", lr=0.05),  # step length, scaled by the schedule
)
