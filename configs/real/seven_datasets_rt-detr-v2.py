# The seven datasets of seven_datasets.py in an RT-DETRv2 of Hugging Face's
# Transformers, with the backbone, width, decoder and pipelines of the DINO there.
# Requires: the extras `hf` and `pretrained`.
from mmengine.config import Config

_base_ = ["../hf/rt-detr-v2-tiny_efficientnet-lite0_1xb8-4e_coco-voc.py"]
mixture = Config.fromfile("{{ fileDirname }}/seven_datasets.py").mixture
