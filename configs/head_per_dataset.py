# A head per dataset on one dense detector: separate class logits, no experts. Copy it
# to configs/my_heads.py, and name your config in _base_, such as "my_mixture.py".
#   damex train configs/my_heads.py
# `damex headroom` trains the same as its baseline `partitioned`.
_base_ = ["own_datasets.py"]
moe = None  # dense
label_space = "partitioned"  # classes are called dataset/class
model = dict(
    ignore_unannotated_classes=True,  # logits learn only from images of their dataset
    label_prior=dict(source="head"),  # a linear head guesses the dataset
)
