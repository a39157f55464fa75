"""Config of the arms of ``damex headroom`` with the detector of ``adapters.py``.

Adapters are shared by all datasets, or one per dataset, with the dataset of every image
given. Results: docs/research/results.md.
"""

_base_ = ["../../../configs/_base_/moe/damex_best.py"]
custom_imports = dict(imports=["damex.registry", "tools.analysis.backbone.adapters"])
model = dict(type="AdaptedDINO")
_dense = dict(moe=None)
arms = {
    "shared_adapters": dict(_dense, model=dict(adapters=dict(datasets=1))),
    "dataset_adapters_told": dict(_dense, model=dict(adapters=dict(datasets=7))),
    "dataset_adapters_told_and_damex_best": dict(model=dict(adapters=dict(datasets=7))),
    "scale_and_shift_told": dict(_dense, model=dict(adapters=dict(datasets=7, rank=0))),
    "rank_32_told": dict(_dense, model=dict(adapters=dict(datasets=7, rank=32))),
    "all_stages_told": dict(
        _dense, model=dict(adapters=dict(datasets=7, stages=[*range(7)]))
    ),
}
