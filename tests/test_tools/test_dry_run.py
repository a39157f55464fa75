"""The dry run of a training against sums by hand."""

import pytest
import torch
from mmdet.registry import MODELS
from torch import distributed

from damex.config_files import read_config
from damex.engine.config import resolve_config
from damex.errors import ConfigError
from tools.analysis.dry_run import app, describe, lay_out

# 64 channels, FFN of 256, experts in the decoder's layers 0 and 2.
LAYERS = 2
FFN = 64 * 256 + 256 + 256 * 64 + 64
# 50 queries, and for a single box 50 groups of a positive and a negative one.
ROUTES = 50 + 100


@pytest.fixture
def read(config):
    """The config with four experts over so many processes."""

    def make(size, **changes):
        cfg = read_config(str(config))
        cfg.merge_from_dict(
            {"moe.num_experts": 4, "moe.expert_parallel": size, **changes}
        )
        return cfg

    return make


def trained_tensors(cfg):
    detector = MODELS.build(resolve_config(cfg).model)
    return [p for p in detector.parameters() if p.requires_grad]


def test_each_process_holds_its_share_of_the_experts(read):
    alone, spread = lay_out(read(1), processes=1), lay_out(read(2), processes=4)
    elsewhere = LAYERS * 2 * FFN * 4
    assert alone.parameters - spread.parameters == elsewhere
    assert alone.gradients - spread.gradients == elsewhere
    tensors = trained_tensors(read(1))
    assert alone.gradients == sum(4 * tensor.numel() for tensor in tensors)
    # AdamW: two moments, and a count of steps for each tensor.
    assert alone.optimizer == 2 * alone.gradients + 4 * len(tensors)
    assert spread.optimizer == 2 * spread.gradients + 4 * len(tensors)
    assert (alone.sent_gradients, alone.sent_tokens) == (0, 0)


def test_what_is_sent_in_a_step(read):
    layout = lay_out(read(2), processes=4)
    experts = LAYERS * 2 * FFN * 4
    dense = layout.gradients - experts
    # Rings of 4 processes, and of the 2 that hold the same experts.
    assert layout.sent_gradients == 2 * dense * 3 / 4 + 2 * experts * 1 / 2
    # There and back, and gradients likewise, of 2 images; half of them stay here.
    assert layout.sent_tokens == 4 * LAYERS * ROUTES * 64 * 4 * 2 / 2
    plain = lay_out(read(1), processes=4)
    assert plain.sent_tokens == 0
    assert plain.sent_gradients == 2 * plain.gradients * 3 / 4


def test_the_lines_say_who_has_which_experts_and_how_long_it_takes(read):
    changes = {"train_dataloader.sampler.samples_per_epoch": 36, "max_epochs": 3}
    found = describe(lay_out(read(2, **changes), processes=4))
    assert "4 processes: 2 x 2 (data x experts), 4 experts" in found
    assert "processes 0, 2: experts 0, 1" in found
    assert "processes 1, 3: experts 2, 3" in found
    # 36 samples are 9 of each process, in batches of 2.
    assert "a batch is 4 x 2 = 8 images, an epoch 5 batches" in found
    assert "the training 3 epochs, 15 steps" in found
    many = describe(lay_out(read(2, **changes), processes=64))
    assert "processes 1, 3, 5, ..., 63: experts 2, 3" in many


REFUSED = [
    (4, 1, "it divides, and there are 1; start 4 processes"),
    (2, 3, r"and there are 3; .* one of \[1, 3\]"),
    (3, 3, "must divide the number of experts, 4"),
]


@pytest.mark.parametrize(("size", "processes", "words"), REFUSED)
def test_what_the_training_refuses_is_refused(read, size, processes, words):
    with pytest.raises(ConfigError, match=words):
        lay_out(read(size), processes=processes)
    assert not distributed.is_initialized()


def test_a_dense_detector_and_a_length_in_iterations(read):
    loop = dict(_delete_=True, type="IterBasedTrainLoop", max_iters=7)
    cfg = read(1, train_cfg=loop)
    cfg.moe = None
    found = describe(lay_out(cfg, processes=2))
    assert "2 processes: 2 x 1 (data x experts), dense" in found
    assert "the training 7 steps" in found


def test_the_command_prints_it_and_starts_nothing(
    config, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    app([str(config), "--processes", "2"])
    assert "a batch is 2 x 2 = 4 images" in capsys.readouterr().out
    assert not (tmp_path / "work_dirs").exists()
    assert torch.is_grad_enabled()
