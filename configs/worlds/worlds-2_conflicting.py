# The positive control with two worlds: a table of 16 entries instead of 64.
_base_ = ["./worlds-8_conflicting.py"]
mixture = _base_.mixture[:2]
