# RT-DETRv2 (Lv et al., 2024, arXiv 2407.17140) of Hugging Face's Transformers, small
# enough for CPUs: a ResNet of half the width, 128 channels, 1 encoder and 3 decoder
# layers, 100 queries. Trained from scratch, so batch norm is not frozen.
# Requires the extra `hf`.
_base_ = ["./pixels_in_0_1.py"]
width = 128
model = dict(
    config=dict(
        model_type="rt_detr_v2",
        backbone_config=dict(
            model_type="rt_detr_resnet",
            layer_type="basic",
            embedding_size=32,
            hidden_sizes=[32, 64, 128, 256],
            depths=[2, 2, 2, 2],
            out_features=["stage2", "stage3", "stage4"],
        ),
        freeze_backbone_batch_norms=False,
        d_model=width,
        encoder_hidden_dim=width,
        decoder_in_channels=[width] * 3,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        decoder_layers=3,
        hidden_expansion=0.5,
        num_queries=100,
        num_denoising=50,
    ),
    test_cfg=dict(max_per_img=100),
)
