# RT-DETRv2 (Lv et al., 2024, arXiv 2407.17140) of Hugging Face's Transformers, small
# enough for CPUs: a ResNet of half the width, 128 channels, 1 encoder and 3 decoder
# layers, 100 queries. Trained from scratch, so batch norm is not frozen.
# Requires the extra `hf`.
width = 128
model = dict(
    type="MoETransformersDetector",
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
    bbox_head=dict(num_classes=None),  # set from the mixture
    test_cfg=dict(max_per_img=100),
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[0.0] * 3,
        std=[255.0] * 3,  # pixels in [0, 1]
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
)
