"""What MixtureRunner completes and refuses before anything is trained."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.logging import MMLogger
from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import DataLoader

from damex.config_files import merge_options, read_config
from damex.engine.config import build_runner, check_detector
from damex.engine.console import ProgressHook
from damex.engine.hooks import IterationSeedHook
from damex.engine.optim import resolve_fractions, set_length
from damex.engine.summary import RunSummaryHook
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def warnings_of_runners(monkeypatch):
    said = []
    monkeypatch.setattr(MMLogger, "warning", lambda self, text: said.append(text))
    return said


def test_the_log_begins_with_versions_and_the_config(make_runner, monkeypatch):
    # mmengine imports torchvision for its version and starts a compiler.
    monkeypatch.setattr("mmengine.runner.runner.collect_env", None)
    runner = make_runner("randomness = dict(seed=7)")
    (log,) = Path(runner.work_dir).glob("*/*.log")
    text = log.read_text()
    for line in ("torch: ", "damex: ", "seed: 7", "processes: 1"):
        assert f"\n    {line}" in text
    assert "\nmixture = [\n" in text


def test_pictures_of_two_runs_of_a_process_go_to_two_folders(make_runner, tmp_path):
    for name in ("a", "b"):
        runner = make_runner(work_dir=str(tmp_path / name))
        (backend,) = runner.visualizer._vis_backends.values()
        assert Path(backend._save_dir).is_relative_to(tmp_path / name)


def types(runner):
    return [type(hook) for hook in runner.hooks]


def test_hooks_of_the_user_do_not_replace_those_of_damex(make_runner):
    runner = make_runner("custom_hooks = [dict(type='EMAHook')]")
    found = types(runner)
    for hook in (EMAHook, IterationSeedHook, ProgressHook, RunSummaryHook):
        assert found.count(hook) == 1


def test_a_hook_of_damex_that_the_config_sets_is_not_added_twice(make_runner):
    runner = make_runner("custom_hooks = [dict(type='ProgressHook', every_seconds=3)]")
    (progress,) = [hook for hook in runner.hooks if isinstance(hook, ProgressHook)]
    assert progress.every_seconds == 3
    assert types(runner).count(RunSummaryHook) == 1


def schedule(runner):
    """Length in iterations, and the schedulers."""
    length = runner.train_loop.max_iters
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    return length, runner.build_param_scheduler(runner.param_schedulers)


@pytest.mark.parametrize("options", [{"max_epochs": 7}, {"train_cfg.max_epochs": 7}])
def test_one_number_moves_schedule_and_validation(make_runner, options):
    extra = "max_epochs = 12\ntrain_cfg = dict(max_epochs=3)"
    runner = make_runner(extra, **options)
    length, (_, cosine) = schedule(runner)
    assert length == 7 * 6
    assert (cosine.T_max, cosine.end) == (42, 42)
    assert "max_epochs" not in runner.cfg  # a written config has one place for it


def test_the_last_epoch_is_the_only_one_that_is_evaluated():
    """mmengine's own loop, with nothing to train, by the shipped ``train_cfg``."""
    train = {**read_config("quickstart").train_cfg, "max_epochs": 7}
    assert train.pop("type", "EpochBasedTrainLoop") == "EpochBasedTrainLoop"
    train.pop("by_epoch", None)
    evaluated = []
    runner = SimpleNamespace(
        model=None,
        call_hook=lambda *_, **__: None,
        val_loop=SimpleNamespace(run=lambda: evaluated.append(loop.epoch)),
    )
    loop = EpochBasedTrainLoop(runner, DataLoader([]), **train)
    loop.run_epoch = lambda: setattr(loop, "_epoch", loop.epoch + 1)
    loop._decide_current_val_interval = lambda: None
    loop.run()
    assert evaluated == [7]


BY_ITERS = "train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=9)"


@pytest.mark.parametrize(
    ("extra", "length", "message"),
    [
        (BY_ITERS, "max_epochs", "loop of train_cfg counts iters; set max_iters"),
        ("", "max_iters", "loop of train_cfg counts epochs; set max_epochs"),
    ],
)
def test_a_length_that_the_loop_does_not_count_is_refused(
    make_runner, extra, length, message
):
    with pytest.raises(ConfigError, match=f"{length}=3 is set, but the {message}"):
        make_runner(extra, **{length: 3})


def test_an_epoch_without_end_is_refused(make_runner):
    endless = "train_dataloader['sampler'] = dict(type='MixtureSampler', infinite=True)"
    with pytest.raises(ConfigError, match="infinite=True is for iterations"):
        make_runner(endless)
    assert make_runner(f"{BY_ITERS}\n{endless}").train_loop.max_iters == 9


def test_a_loop_of_the_users_own_may_count_what_it_likes():
    cfg = Config(dict(train_cfg=dict(type="MyLoop"), max_iters=3, max_epochs=5))
    set_length(cfg)
    assert cfg.to_dict() == dict(
        train_cfg=dict(type="MyLoop", max_epochs=5), max_iters=3
    )


def test_a_training_by_iterations_moves_its_schedule_too(make_runner):
    runner = make_runner(BY_ITERS, max_iters=15)
    length, (_, cosine) = schedule(runner)
    assert length == cosine.T_max == cosine.end == 15


def test_points_in_time_below_1_are_shares_of_the_training():
    size = dict(epochs=12, iters=72)
    steps = dict(type="MultiStepLR", by_epoch=False, milestones=[11 / 12, 1000])
    (found,) = resolve_fractions([dict(steps, begin=0.3, end=0.95)], **size)
    assert found == dict(steps, milestones=[66, 1000], begin=22, end=69)
    several = dict(detector=dict(type="LinearLR", begin=0.5, end=9))
    assert resolve_fractions(several, **size)["detector"]["begin"] == 6
    ends = [resolve_fractions(dict(steps, end=end), **size)["end"] for end in (1.0, 1)]
    assert ends == [72, 1]


def rates(runner):
    """The learning rate of each iteration."""
    length, schedulers = schedule(runner)
    group, found = runner.optim_wrapper.optimizer.param_groups[0], []
    for _ in range(length):
        found.append(group["lr"])
        runner.optim_wrapper.step()
        for scheduler in schedulers:
            scheduler.step()
    return found


def test_a_learning_rate_of_two_cycles(make_runner):
    """Without ``ResetLR`` the second cycle would stay below the end of the first."""
    base = ROOT / "configs/_base_/schedules/adamw_tiny_two_cycles.py"
    cycles = [dict(one) for one in Config.fromfile(base).param_scheduler]
    runner = make_runner(f"param_scheduler = {cycles}", max_epochs=50)  # 300 iterations
    lr = runner.optim_wrapper["optimizer"]["lr"]
    assert lr == 0.0012
    found = rates(runner)
    assert found[0] == pytest.approx(0.05 * lr)
    assert found[149] == pytest.approx(0.02 * lr, rel=0.01)
    assert found[150] == pytest.approx(0.05 * lr)  # half of 300
    assert max(found[150:]) == found[161]  # 4 percent of them later
    assert found[161] == pytest.approx(lr, rel=0.02)
    assert found[162:] == sorted(found[162:], reverse=True)
    assert found[299] == pytest.approx(0.02 * lr, rel=0.01)


def test_misspelt_keys_are_said(make_runner, warnings_of_runners):
    make_runner("load_form = 'x.pth'\nimage_size = 64")
    assert warnings_of_runners == [
        "the config sets load_form, which nothing reads; did you mean load_from?"
    ]


def test_no_worker_needs_no_other_setting(make_runner):
    runner = make_runner("train_dataloader['persistent_workers'] = True")
    assert runner.train_dataloader.persistent_workers is False


@pytest.mark.parametrize("seed", ["abc", -1, 1.5])
def test_a_seed_that_is_none_is_refused(make_runner, seed):
    with pytest.raises(ConfigError, match=r"randomness\.seed must be an integer of 0"):
        make_runner(**{"randomness.seed": seed})


def test_experts_for_a_detector_without_a_place_for_them_are_refused():
    message = r"model.type='DINO' takes no experts; did you mean 'MoEDINO'\?"
    with pytest.raises(ConfigError, match=message):
        check_detector(dict(type="DINO", moe=dict(num_experts=2)))
    dense = dict(type="DINO", moe=None)
    check_detector(dense)
    assert "moe" not in dense


def test_a_checkpoint_of_other_experts_says_so(make_runner, warnings_of_runners):
    """DAMEX's routing loss has no weights, so all tensors of `vanilla` fit."""
    trained = make_runner()
    trained.model.init_weights()
    states = dict(save_optimizer=False, save_param_scheduler=False)
    trained.save_checkpoint(trained.work_dir, "damex.pth", by_epoch=False, **states)
    path = f"{trained.work_dir}/damex.pth"
    make_runner(load_from=path).test()
    plain = f"{trained.work_dir}/weights.pth"  # as check_names advises
    torch.save(trained.model.state_dict(), plain)
    averaged = dict(load_from=plain, custom_hooks=[dict(type="EMAHook")])
    make_runner(**averaged).test()
    make_runner(**averaged, resume=True).test()  # as the config of a resumed run says
    assert not any("other experts" in text for text in warnings_of_runners)
    make_runner(load_from=path, moe="vanilla").test()
    (note,) = [text for text in warnings_of_runners if "other experts" in text]
    assert note.startswith(f"{path}: the checkpoint had other experts: moe.")
    assert "moe.losses.DatasetRoutingLoss was DatasetRoutingLoss and is None" in note


@pytest.mark.parametrize(
    ("meta", "is_evaluated"), [({}, False), ({}, True), (dict(meta=None), True)]
)
def test_a_checkpoint_of_weights_alone_can_be_loaded(make_runner, meta, is_evaluated):
    runner = make_runner()
    path = f"{runner.work_dir}/weights.pth"
    state = {k: torch.zeros_like(v) for k, v in runner.model.state_dict().items()}
    torch.save(dict(state_dict=state, **meta), path)
    runner.evaluates = is_evaluated
    runner.load_checkpoint(path)
    assert not any(parameter.any() for parameter in runner.model.parameters())


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_last_checkpoint_is_not_that_of_a_training_before(
    make_runner, warnings_of_runners, evaluates
):
    """A new training may end before its first; an evaluation changes nothing."""
    runner = make_runner()
    _, runner.param_schedulers = schedule(runner)
    marker = Path(runner.work_dir, "last_checkpoint")
    marker.write_text("epoch_9.pth")
    best = marker.with_name("best_mixture_mean_AP_epoch_9.pth")
    best.write_bytes(b"")
    runner.evaluates = evaluates
    runner.load_or_resume()
    assert marker.exists() == evaluates
    assert best.exists()
    said = [text for text in warnings_of_runners if "of an earlier training" in text]
    assert len(said) == (not evaluates)


@pytest.mark.parametrize(("epochs", "is_said"), [(2, False), (5, True)])
def test_a_schedule_of_another_length_is_said(
    make_runner, warnings_of_runners, epochs, is_said
):
    first = make_runner(max_epochs=2)
    first.model.init_weights()
    _, first.param_schedulers = schedule(first)
    first.save_checkpoint(first.work_dir, "first.pth", by_epoch=False)
    path = f"{first.work_dir}/first.pth"
    resumed = make_runner(max_epochs=epochs, load_from=path, resume=True)
    resumed.model.init_weights = pytest.fail  # they may be out of reach by now
    resumed._init_model_weights()
    _, resumed.param_schedulers = schedule(resumed)
    resumed.load_or_resume()
    assert resumed.param_schedulers[1].end == 12
    found = [text for text in warnings_of_runners if "checkpoint's schedule" in text]
    assert len(found) == is_said


def test_a_config_of_mmdet_becomes_one_of_damex_as_the_docs_say(tmp_path, two_datasets):
    pages = "".join(p.read_text("utf-8") for p in (ROOT / "docs").rglob("*.md"))
    (text,) = re.findall(r'```python\n(_base_ = \["mmdet::.*?)```', pages, re.DOTALL)
    text = re.sub(r"mixture = \[.*?\n\]", f"mixture = {two_datasets}", text, flags=re.S)
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    cfg = Config.fromfile(path)
    no_workers = dict(num_workers=0, persistent_workers=False)
    changes = {
        "work_dir": str(tmp_path / "work"),
        "model.backbone.init_cfg": None,  # nothing to download
        **{f"train_dataloader.{key}": value for key, value in no_workers.items()},
    }
    merge_options(cfg, changes)
    runner = build_runner(cfg)
    assert runner.model.bbox_head.num_classes == 4
    assert len(moe_blocks(runner.model)) == 12
    loader = runner.build_dataloader(runner._train_dataloader, seed=0)
    groups = {sample.group_id for batch in loader for sample in batch["data_samples"]}
    assert groups == {0, 1}
