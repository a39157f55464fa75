# The opposite of the positive control: all worlds call a thing alike.
#   python -m damex.toydata --worlds 8 --names agreeing --out data/worlds_agreeing
_base_ = ["./worlds-8_conflicting.py"]
mixture = [
    dict(
        name=name,
        data_root=f"data/worlds_agreeing/{name}/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    )
    for name in ["ruby", "amber", "olive", "mint", "teal", "azure", "indigo", "plum"]
]
