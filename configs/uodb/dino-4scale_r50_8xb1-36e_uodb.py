# The dense baseline of damex-dino-4scale_r50_8xb1-36e_uodb.py: without its experts.
_base_ = ["./damex-dino-4scale_r50_8xb1-36e_uodb.py"]
moe = None
