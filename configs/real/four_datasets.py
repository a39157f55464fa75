# Four of the seven datasets; they have no class in common.
_base_ = ["../own_datasets.py"]
mixture = [
    dict(name=name, root=f"data/seven/{name}", weight=1.0)
    for name in ["aquarium", "bpmn_sketches", "microcontrollers", "wind_turbines"]
]
