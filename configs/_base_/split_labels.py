# What fails where datasets look alike: arms of configs/worlds/split_labels.py.
_base_ = ["./moe/damex_best.py"]
arms = dict(
    # What `damex train --data` does: halves of one dataset share an expert.
    shared={
        "mixture.0.group": "digits",
        "mixture.1.group": "digits",
        "mixture.2.group": "shapes",
        "mixture.3.group": "shapes",
    },
    forcing_alone=dict(moe=dict(image_vote=False)),
    vote_alone=dict(moe=dict(teacher_forcing=False)),
)
