# Dataloaders and evaluators for any `mixture`; configs add the pipelines.
train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="MixtureSampler"),
    dataset=dict(type="MixtureDataset", split="train"),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="MixtureDataset", split="val"),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="MixtureMetric")
test_evaluator = val_evaluator
