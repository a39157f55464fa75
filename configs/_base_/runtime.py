# Defaults shared by all configs: registry, runner, hooks, logging.
custom_imports = dict(imports=["damex.registry"], allow_failed_imports=False)
default_scope = "mmdet"
runner_type = "MixtureRunner"

default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50),
    param_scheduler=dict(type="ParamSchedulerHook"),
    # Keeps two checkpoints; an old one is deleted after the new one is written.
    checkpoint=dict(
        type="CheckpointHook",
        interval=1,
        max_keep_ckpts=2,
        save_best="mixture/mean/AP",
        rule="greater",
    ),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="MixtureVisualizationHook"),
    data_check=dict(type="DataCheckHook"),
)
randomness = dict(seed=0)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)
vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(
    type="DetLocalVisualizer", vis_backends=vis_backends, name="visualizer"
)
log_processor = dict(type="LogProcessor", window_size=50, by_epoch=True)
log_level = "INFO"
console = "progress"  # "full" shows every log line on the screen too
load_from = None
resume = False
