# The positive control with a tenth of its training images: 30 of each world.
#   python -m damex.toydata --worlds 8 --train 30 --val 40 --out data/worlds_few
_base_ = ["./worlds-8_conflicting.py"]
mixture = [
    dict(entry, data_root=entry["data_root"].replace("worlds", "worlds_few"))
    for entry in _base_.mixture
]
