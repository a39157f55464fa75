# Settings that train the template's detector faster, as arms of `damex headroom`: twice
# the learning rate, twice the classification loss weight, three times the denoising
# queries. The queries increase the time per iteration by a quarter, so their arms train
# for fewer iterations. Results: docs/research/results.md.
#   damex headroom configs/real/seven_datasets.py --cfg-options max_epochs=2 \
#       --seeds 1 2 3 --baselines dense_lr2 --experts configs/_base_/faster_learning.py
_base_ = ["./moe/damex_best.py"]
optim_wrapper = dict(optimizer=dict(lr=0.0016))
model = dict(bbox_head=dict(loss_cls=dict(loss_weight=2.0)))
_denoising = {
    "model.dn_cfg.group_cfg.num_dn_queries": 150,
    "train_dataloader.sampler.samples_per_epoch": 1920,
}
arms = {
    "dense_class2": dict(moe=None),
    "dense_class2_dn150": {"moe": None, **_denoising},
    "damex_best_class2": dict(),
    "damex_best_class2_dn150": _denoising,
}
