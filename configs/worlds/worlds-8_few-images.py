# The positive control with a tenth of the training images: 30 per world.
#   python -m studies.worlds --train 30 --val 40 --out data/worlds_few
_base_ = ["./worlds-8_conflicting.py"]
mixture = [
    dict(entry, data_root=entry["data_root"].replace("worlds", "worlds_few"))
    for entry in _base_.mixture
]
