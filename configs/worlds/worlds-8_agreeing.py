# The negative control: all worlds use the same class names.
#   python -m studies.worlds --names agreeing --val 40 --out data/worlds_agreeing
_base_ = ["./worlds-8_conflicting.py"]
mixture = [
    dict(entry, data_root=entry["data_root"].replace("worlds", "worlds_agreeing"))
    for entry in _base_.mixture
]
