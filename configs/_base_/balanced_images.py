# Images weigh alike in the loss, or nearly, whether they show one object or forty; with
# whole images, with the windows of tiles.py, and with experts (root_best).
#   damex headroom configs/real/seven_datasets.py --cfg-options max_epochs=2 \
#       --seeds 1 2 3 4 5 --baselines --experts configs/_base_/balanced_images.py \
#       --work-dir work_dirs/balanced --jobs 2
# Predictions: docs/research/predictions.md.
_base_ = ["moe/damex_best.py"]
root_best = dict(model=dict(image_balance=0.5))
root = dict(root_best, moe=None)
tile = dict(tile=320)
arms = dict(
    image=dict(moe=None, model=dict(image_balance=1.0)),
    root=root,
    root_tile=dict(root, mixture={"1": tile, "4": tile, "5": tile}),
    root_best=root_best,
)
del root, root_best, tile
