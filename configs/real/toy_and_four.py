# The toy mixture and four real datasets, at the image size of the quick start.
_base_ = ["../quickstart.py"]
names = ["aquarium", "bpmn_sketches", "microcontrollers", "wind_turbines"]
mixture = [
    *_base_.mixture,
    *[dict(name=name, root=f"data/seven/{name}", weight=1.0) for name in names],
]
