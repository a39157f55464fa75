# damex-dino-4scale_r50_1xb4-12e_finetune.py on eight GPUs with two images each.
#   tools/dist_train.sh configs/damex_dino/damex-dino-4scale_r50_8xb2-12e_finetune.py 8
_base_ = ["./damex-dino-4scale_r50_1xb4-12e_finetune.py"]
train_dataloader = dict(batch_size=2, num_workers=2)
optim_wrapper = dict(optimizer=dict(lr=0.0001))
auto_scale_lr = dict(base_batch_size=16)
