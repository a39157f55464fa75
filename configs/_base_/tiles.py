# Windows for those of configs/real/seven_datasets.py for which the data check
# recommends them: most boxes are below 16 pixels where images have 256.
#   damex headroom configs/real/seven_datasets.py --cfg-options max_epochs=2 \
#       --seeds 1 2 3 4 5 6 --baselines --experts configs/_base_/tiles.py \
#       --work-dir work_dirs/tiles --jobs 2
# Predictions: docs/research/predictions.md.
moe = None
tile = dict(tile=320)
# bpmn_sketches, road_scenes and thermal_uav
arms = dict(tile=dict(mixture={"1": tile, "4": tile, "5": tile}))
del tile
