# More pixels per object: one change to configs/real/small_objects.py per arm.
#   python -m damex headroom configs/real/small_objects.py --seeds 1 --baselines \
#       --experts configs/_base_/small_objects.py --work-dir work_dirs/small_objects
# trains whole_256 as "dense" and the arms, and skips finished runs. It scores whole
# images. By object size, and by windows:
#   at() {
#       local run=work_dirs/small_objects/$1 out=work_dirs/small_objects/$1/seed1.json
#       [ -f $out ] || python -m tools.analysis.windows $run/config.py \
#           $run/seed1/epoch_$2.pth --out $out "${@:3}"
#   }
#   at dense 2 --image-size 256; at stride4 2 --image-size 256
#   at whole_384 2 --size 384 --image-size 384; at whole_512 2 --size 512
#   at tiles 2; at half 2 --whole
#   at half_long 4 --whole; at whole_long 4 --image-size 256
moe = None
load = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
]
whole = [dict(type="Resize", scale=(256, 256), keep_ratio=True)]
# The crop is taken before padding, and is padded only where an image is lower or
# narrower than it (25 of 260 diagrams). The images have 640 pixels and are scaled down.
# Crops without an object stay, as most windows of an image in evaluation have none.
crop = [
    dict(type="Resize", scale=(512, 512), keep_ratio=True),
    dict(
        type="RandomCrop",
        crop_size=(256, 256),
        allow_negative_crop=True,
        bbox_clip_border=False,
    ),
    # A box is a label if 40 % of its area is in the crop. Less of it is neither a label
    # nor background, as COCO's crowds.
    dict(type="IgnoreCutBoxes", min_visible=0.4),
]
pack = [
    dict(type="RandomFlip", prob=0.5),
    dict(type="Pad", size=(256, 256)),
    dict(type="PackDetInputs"),
]
either = [dict(type="RandomChoice", transforms=[whole, crop], prob=[0.5, 0.5])]
halves = dict(
    train_dataloader=dict(dataset=dict(pipeline=[*load, *either, *pack])),
    pipeline_check="off",  # evaluation at the end of training shows whole images
)
# An iteration takes 1.98 (384 pixels), 4.41 (512), 1.07 (tiles), 1.03 (half) and 3.65
# times (stride 4) the processor time of one of whole_256: medians of five rounds in
# turns, one thread, without reading images. In the time of 600 iterations fit as many;
# tiles and half have tensors of the same shapes, and keep 600.
its_300, its_136, its_164 = (
    dict(sampler=dict(samples_per_epoch=8 * count // 2)) for count in (300, 136, 164)
)
arms = dict(
    whole_384=dict(image_size=384, train_dataloader=its_300),
    whole_512=dict(image_size=512, train_dataloader=its_136),
    tiles=dict(
        train_dataloader=dict(dataset=dict(pipeline=[*load, *crop, *pack])),
        pipeline_check="off",
    ),
    half=halves,
    stride4=dict(
        train_dataloader=its_164,
        model=dict(
            num_feature_levels=4,
            backbone=dict(out_indices=(1, 2, 3, 4)),
            neck=dict(in_channels=[24, 40, 112, 320], num_outs=4),
            encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_levels=4))),
            decoder=dict(layer_cfg=dict(cross_attn_cfg=dict(num_levels=4))),
        ),
    ),
    half_long=dict(halves, train_cfg=dict(max_epochs=4)),
    whole_long=dict(train_cfg=dict(max_epochs=4)),  # the control of half_long
)
# They would become settings of each arm.
del load, whole, crop, pack, either, halves, its_300, its_136, its_164
