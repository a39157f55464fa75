# Two pairs of datasets that look alike: halves of the toy digits and shapes, each with
# the labels of half of the classes. Experts of their own never see the labels of the
# other half.
#   damex toydata
#   python -m studies.split_labels data/toy/digits data/toy/shapes --out data/halves_toy
#   damex headroom configs/worlds/split_labels.py --seeds 1 2 3 \
#       --baselines partitioned oracle \
#       --experts damex_best damex vanilla configs/_base_/split_labels.py
_base_ = ["../quickstart.py"]
work_dir = "work_dirs/split_labels"
mixture = [
    dict(
        name=name,
        data_root=f"data/halves_toy/{name}/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    )
    for name in ("digits_a", "digits_b", "shapes_a", "shapes_b")
]
max_epochs = 2  # 600 iterations
