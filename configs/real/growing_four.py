# Growing, step 2: wind turbines are added as half of the samples.
_base_ = ["./growing_three.py"]
mixture = [
    *_base_.mixture,
    dict(name="wind_turbines", root="data/seven/wind_turbines", weight=3.0),
]
train_dataloader = dict(sampler=dict(samples_per_epoch=1200))
