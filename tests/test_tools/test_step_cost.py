"""The cost of experts in a step: which detectors are compared, and what is timed."""

import torch

from damex.config_files import config_of
from damex.engine.config import resolve_config
from damex.models.insertion import moe_blocks
from tools.analysis.step_cost import _timed, detectors_of, measure


def test_a_detector_is_timed_with_and_without_its_experts(two_datasets):
    cfg = config_of("quickstart")
    cfg.mixture = two_datasets
    model = resolve_config(cfg)["model"]
    torch.manual_seed(0)
    rivals = dict(detectors_of(model, torch.rand(2, 3, 128, 128) * 255))
    (dense, _), (moe, step) = rivals["without experts"], rivals["with experts"]
    assert [len(moe_blocks(one)) > 0 for one in (dense, moe)] == [False, True]
    _timed(moe, step, True)()
    grads = {name for name, p in moe.named_parameters() if p.grad is not None}
    assert grads == {name for name, p in moe.named_parameters() if p.requires_grad}
    _timed(moe, step, False)()
    assert all(p.grad is None for p in moe.parameters())
    cells = measure(rivals, rounds=1)
    assert cells["without experts"][1].endswith("ms (1.000)")
    kept = [int(row[-1]) for row in cells.values()]
    assert 0 < kept[0] <= kept[1]
