# Four of the seven datasets, with no class in common.
_base_ = ["../own_datasets.py"]
mixture = [
    dict(name=name, root=f"data/seven/{name}", weight=1.0)
    for name in ["aquarium", "bpmn_sketches", "microcontrollers", "wind_turbines"]
]
# The template's settings when this was measured; faster ones replaced them.
optim_wrapper = dict(optimizer=dict(lr=0.0008))
model = dict(bbox_head=dict(loss_cls=dict(loss_weight=1.0)))
