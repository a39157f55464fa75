# The positive control with two worlds: a table of 16 entries instead of 64.
_base_ = ["./worlds-8_conflicting.py"]
mixture = [
    dict(
        name=name,
        data_root=f"data/worlds/{name}/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    )
    for name in ["ruby", "amber"]
]
