# Two worlds with the same class names; amber does not annotate blick, which
# stands in its images as often as in ruby's. Is it found there?
#   python -m damex.toydata --worlds 8 --names agreeing --val 40 \
#       --out data/worlds_agreeing
#   python tools/study.py missing_labels
_base_ = ["./worlds-8_agreeing.py"]
mixture = _base_.mixture[:2]
mixture[1]["classes"] = ["dax", "fep", "gorp", "mip", "toma", "wug", "zot"]
model = dict(ignore_unannotated_classes=True)
