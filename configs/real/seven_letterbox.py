# The control of padding: every image gets a black border up to a square, which counts
# as image. The template masks that border. See docs/research/results.md.
#   damex train configs/real/seven_letterbox.py --cfg-options moe=dense max_epochs=2
_base_ = ["./seven_datasets.py"]
_square = dict(type="Pad", size=(256, 256))
train_pipeline = [*_base_.train_pipeline[:-1], _square, _base_.train_pipeline[-1]]
test_pipeline = [*_base_.test_pipeline[:-1], _square, _base_.test_pipeline[-1]]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
