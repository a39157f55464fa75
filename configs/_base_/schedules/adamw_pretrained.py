# adamw_tiny.py for a pretrained backbone, with a tenth of the LR for the backbone.
_base_ = ["./adamw_tiny.py"]
optim_wrapper = dict(
    optimizer=dict(lr=0.0008),
    paramwise_cfg=dict(custom_keys={"backbone": dict(lr_mult=0.1)}),
)
