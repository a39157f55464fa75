"""Importing this module adds everything of damex to mmdet's registries."""

import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):
    # mmdet prints, twice, that an optional package of its fork is not there.
    import mmdet.datasets  # noqa: F401

from damex.datasets import mixture, named_coco, sampler
from damex.engine import (
    expert_optimizer,
    painted_images,
    progress,
    reproducibility,
    run_summary,
    runner,
)
from damex.evaluation import mixture_metric
from damex.models import detectors, moe_parts

__all__ = [
    "detectors",
    "expert_optimizer",
    "mixture",
    "mixture_metric",
    "moe_parts",
    "named_coco",
    "painted_images",
    "progress",
    "reproducibility",
    "run_summary",
    "runner",
    "sampler",
]
