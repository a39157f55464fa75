# Growing, step 1: three datasets, 450 iterations. See docs/research/results.md.
_base_ = ["../own_datasets.py"]
mixture = [
    dict(name=name, root=f"data/seven/{name}", weight=1.0)
    for name in ["aquarium", "bpmn_sketches", "microcontrollers"]
]
max_epochs = 2
train_dataloader = dict(sampler=dict(samples_per_epoch=1800))
# The template's settings when this was measured; faster ones replaced them.
optim_wrapper = dict(optimizer=dict(lr=0.0008))
model = dict(bbox_head=dict(loss_cls=dict(loss_weight=1.0)))
