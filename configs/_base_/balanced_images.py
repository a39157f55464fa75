# Images weigh alike in the loss, or nearly, whether they show one object or forty.
#   damex headroom configs/real/seven_datasets.py --cfg-options max_epochs=2 \
#       --seeds 1 2 3 4 5 6 --baselines --experts configs/_base_/balanced_images.py \
#       --work-dir work_dirs/balanced --jobs 2
# What is expected is in docs/research/predictions.md.
moe = None
arms = dict(
    image=dict(model=dict(image_balance=1.0)),
    root=dict(model=dict(image_balance=0.5)),
)
