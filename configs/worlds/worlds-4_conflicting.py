# The positive control with four worlds: 32 pairs of object and name instead of 64.
_base_ = ["./worlds-8_conflicting.py"]
mixture = _base_.mixture[:4]
