# Growing, step 1: three datasets, 450 iterations. See docs/results/growing.md.
_base_ = ["../own_datasets.py"]
# The published runs are older than the template's image_balance=0.5 and Muon.
model = dict(image_balance=0.0)
optim_wrapper = dict(constructor="DefaultOptimWrapperConstructor")
mixture = [
    dict(name=name, root=f"data/seven/{name}", weight=1.0)
    for name in ["aquarium", "bpmn_sketches", "microcontrollers"]
]
max_epochs = 2
train_dataloader = dict(sampler=dict(samples_per_epoch=1800))
