# The vanilla mixture of experts to compare with the DAMEX config of this folder: as many
# experts in the same layers, and in place of the datasets the balancing losses of the
# paper's baseline, over foreground tokens, 0.1 in all.
_base_ = ["./damex-dino-4scale_r50_8xb1-36e_uodb.py"]
moe = dict(
    losses=[
        dict(type="ImportanceLoss", weight=0.05, tokens="foreground"),
        dict(type="LoadLoss", weight=0.05, tokens="foreground"),
    ]
)
