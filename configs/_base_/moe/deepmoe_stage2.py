# DeepMoE, training stage 2: the gates of stage 1 (deepmoe.py) are frozen, their losses
# are removed, and the detector is fine-tuned. Start from the checkpoint of stage 1:
#   --cfg-options moe=configs/_base_/moe/deepmoe_stage2.py load_from=STAGE1.pth
# Paper: Wang et al., "Deep Mixture of Experts via Shallow Embedding", UAI 2019, arXiv
# 1806.01531.
# Cost: as deepmoe.py.
_base_ = ["./deepmoe.py"]
moe = dict(channels=dict(frozen=True))
