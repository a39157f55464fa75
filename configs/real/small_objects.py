# The four of the seven small real datasets whose objects are small, without experts:
# half of the objects are below 5 (road_scenes) to 21 pixels (aquarium) at 256 pixels.
# What lifts their AP at equal time of training? The arms, their lengths and commands
# are in configs/_base_/small_objects.py, what is expected in
# docs/research/predictions.md.
_base_ = ["./seven_datasets.py"]
small = ["aquarium", "bpmn_sketches", "road_scenes", "thermal_uav"]
mixture = [entry for entry in _base_.mixture if entry["name"] in small]
max_epochs = 2  # 600 iterations
moe = None
