# The quick start: a tiny DAMEX-DINO on the toy mixture, on the CPU.
#   python -m damex.toydata && python tools/train.py configs/quickstart.py
# Needs: nothing that is not generated. Ends with a table of AP per dataset.
_base_ = [
    "_base_/models/moe-dino_tiny.py",
    "_base_/moe/damex.py",
    "_base_/datasets/toy.py",
    "_base_/schedules/adamw_tiny.py",
    "_base_/runtime.py",
]
work_dir = "work_dirs/quickstart"
