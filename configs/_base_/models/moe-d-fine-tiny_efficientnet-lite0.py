# moe-rt-detr-v2-tiny_efficientnet-lite0 as a D-FINE, with an encoder of half the depth.
# Requires the extra `hf`.
_base_ = ["./moe-rt-detr-v2-tiny_efficientnet-lite0.py"]
model = dict(config=dict(model_type="d_fine", depth_mult=0.5))
