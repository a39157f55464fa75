# Two worlds with the same class names. The class blick is not annotated in amber,
# though as frequent there as in ruby: can the detector find it in amber?
#   python -m studies.worlds --names agreeing --val 40 --out data/worlds_agreeing
#   python tools/study.py missing_labels
_base_ = ["./worlds-8_agreeing.py"]
mixture = _base_.mixture[:2]
mixture[1]["classes"] = ["dax", "fep", "gorp", "mip", "toma", "wug", "zot"]
model = dict(ignore_unannotated_classes=True)
