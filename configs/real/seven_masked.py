# Control of the padding experiment: the border of the square is masked, instead of
# part of the image as in the template, and boxes are relative to the image. See
# docs/results/padding.md.
#   damex train configs/real/seven_masked.py --cfg-options moe=dense max_epochs=2
_base_ = ["./seven_datasets.py"]
train_pipeline = [s for s in _base_.train_pipeline if s["type"] != "Pad"]
test_pipeline = [s for s in _base_.test_pipeline if s["type"] != "Pad"]
model = dict(data_preprocessor=dict(pad_size_divisor=_base_.image_size))
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
