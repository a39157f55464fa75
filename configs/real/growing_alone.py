# Growing, control: only wind turbines, as many of them as in step 2.
_base_ = ["./growing_three.py"]
mixture = [dict(name="wind_turbines", root="data/seven/wind_turbines", weight=1.0)]
train_dataloader = dict(sampler=dict(samples_per_epoch=600))
