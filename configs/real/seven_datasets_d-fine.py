# The seven datasets of seven_datasets.py in a D-FINE of Hugging Face's
# Transformers, with the backbone, width, decoder and pipelines of the DINO there.
# Requires: the extras `hf` and `pretrained`.
from mmengine.config import Config

_base_ = ["../hf/d-fine-tiny_efficientnet-lite0_1xb8-4e_toy.py"]
dino = Config.fromfile("{{ fileDirname }}/seven_datasets.py")
mixture = dino.mixture
train_dataloader = dict(
    sampler=dict(samples_per_epoch=2400), dataset=dict(pipeline=dino.train_pipeline)
)
del dino
