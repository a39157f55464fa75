# Images weigh alike in the loss, or nearly, whether they show one object or forty; with
# whole images, and with the windows of tiles.py.
#   damex headroom configs/real/seven_datasets.py --cfg-options max_epochs=2 \
#       --seeds 1 2 3 4 5 --baselines --experts configs/_base_/balanced_images.py \
#       --work-dir work_dirs/balanced --jobs 2
# What is expected is in docs/research/predictions.md.
moe = None
root = dict(model=dict(image_balance=0.5))
tile = dict(tile=320)
arms = dict(
    image=dict(model=dict(image_balance=1.0)),
    root=root,
    root_tile=dict(root, mixture={"1": tile, "4": tile, "5": tile}),
)
del root, tile
