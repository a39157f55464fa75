# Two cycles of warm-up and decay. The second is for experts that are created half-way
# through training by moe.upcycling=dict(share=0.5).
# Paper: Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense
# Checkpoints", ICLR 2023, arXiv 2212.05055.
# Numbers below 1 are fractions of the training.
_base_ = ["./adamw_tiny.py"]
param_scheduler = [
    dict(type="LinearLR", start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False, end=0.5),
    dict(type="ResetLR", by_epoch=False, begin=0.5),
    dict(type="LinearLR", start_factor=0.05, by_epoch=False, begin=0.5, end=0.54),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False, begin=0.5),
]
