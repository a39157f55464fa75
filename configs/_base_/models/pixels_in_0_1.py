# What published detectors of Hugging Face's Transformers expect: RGB, pixels in [0, 1].
model = dict(
    type="MoETransformersDetector",
    bbox_head=dict(num_classes=None),  # set from the mixture
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[0.0] * 3,
        std=[255.0] * 3,
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
)
