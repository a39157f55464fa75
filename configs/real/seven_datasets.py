# Seven small real datasets in one detector: the template configs/own_datasets.py with
# class names shared by two of them. Sources: data/README.md;
# the files and their hashes: data/seven.txt.
#   damex headroom configs/real/seven_datasets.py --seeds 1 2 3 \
#       --baselines dense_lr2 partitioned single --experts damex damex_best
_base_ = ["../own_datasets.py"]
# The published runs are older than the template's image_balance=0.5 and Muon.
model = dict(image_balance=0.0)
optim_wrapper = dict(constructor="DefaultOptimWrapperConstructor")
words = dict(
    # Bicycles and cars are one class each, seen from a car or from a drone. Neither
    # dataset annotates all classes of the other.
    road_scenes=dict(bike="bicycle", motobike="motorcycle", vehicle="car"),
    thermal_uav=dict(Bicycle="bicycle", Car="car", Person="person"),
)
names = [
    "aquarium",
    "bpmn_sketches",
    "microcontrollers",
    "orchard_apples",
    "road_scenes",
    "thermal_uav",
    "wind_turbines",
]
mixture = [
    dict(name=name, root=f"data/seven/{name}", weight=1.0, rename=words.get(name, {}))
    for name in names
]
