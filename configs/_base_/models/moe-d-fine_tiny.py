# D-FINE (Peng et al., ICLR 2025, arXiv 2410.13842) of Hugging Face's Transformers,
# small enough for CPUs: an HGNetV2 of D-FINE-N's size, 128 channels, 1 encoder and 3
# decoder layers, 100 queries. Trained from scratch, so batch norm is not frozen.
# Requires the extra `hf`.
_base_ = ["./moe-rt-detr-v2_tiny.py"]
model = dict(
    config=dict(
        model_type="d_fine",
        backbone_config=dict(
            _delete_=True,
            model_type="hgnet_v2",
            stem_channels=[3, 16, 16],
            stage_in_channels=[16, 64, 256, 512],
            stage_mid_channels=[16, 32, 64, 128],
            stage_out_channels=[64, 256, 512, 1024],
            hidden_sizes=[64, 256, 512, 1024],  # as stage_out_channels
            stage_num_blocks=[1, 1, 2, 1],
            stage_numb_of_layers=[3, 3, 3, 3],
            use_learnable_affine_block=True,
            out_features=["stage2", "stage3", "stage4"],
        ),
        depth_mult=0.5,
    )
)
