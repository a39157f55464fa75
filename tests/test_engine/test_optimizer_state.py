"""``load_optimizer=True``: a new training with the moments of an earlier one."""

import copy
from functools import partial

import pytest
import torch
from mmengine.optim import (
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

from damex.engine.optimizer_state import check_resumable, load_moments, parameter_names
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks

COPIES = dict(
    layers=dict(decoder=[0, 2]),
    num_experts=3,
    gate=dict(type="TopKGate", k=1, renormalize=True),
)
FINE = dict(layers=dict(decoder=[1]), fine_grained=dict(parts=2, copies=2))


ADAMW = dict(lr=1e-3, weight_decay=0.1, amsgrad=True)


def adamw(detector, **changes):
    return torch.optim.AdamW(detector.parameters(), **{**ADAMW, **changes})


def muon(detector):
    config = dict(type="AdamW", lr=1e-3)
    kind = dict(constructor="MuonOptimWrapperConstructor", optimizer=config)
    return build_optim_wrapper(detector, kind).optimizer


def backward(detector, make_batch, run_loss, total, seed):
    detector.zero_grad()
    total(run_loss(detector, make_batch([0, 1], seed=seed))).backward()


@pytest.fixture
def trained(build, make_batch, run_loss, total):
    """Train a detector for two steps: the detector, and its checkpoint."""

    def make(moe=None, optimizer=adamw, **changes):
        detector = build(moe=moe, **changes)
        built = optimizer(detector)
        for seed in range(2):
            backward(detector, make_batch, run_loss, total, seed)
            built.step()
        return detector, checkpoint_of(detector, built)

    return make


def checkpoint_of(detector, optimizer):
    return copy.deepcopy(
        dict(
            state_dict=detector.state_dict(),
            optimizer=optimizer.state_dict(),
            meta=dict(optimizer_names=parameter_names(detector, optimizer)),
        )
    )


def start(detector, checkpoint, optimizer):
    detector.load_state_dict(checkpoint["state_dict"])
    return load_moments(checkpoint, detector, optimizer, path="dense.pth")


def expected_of(dense, name):
    """A dense detector's tensors, as the experts that start as copies have them."""
    head, bank, tensor = name.partition(".moe.experts.")
    if not bank:
        return dense[name]
    key = dict(w1_EDH="0.0.weight", b1_EH="0.0.bias", w2_EHD="1.weight", b2_ED="1.bias")
    value = dense[f"{head}.layers.{key[tensor]}"]
    value = value.t() if tensor.startswith("w") else value
    return value.expand(3, *value.shape)


def test_a_first_step_on_the_dense_gradient_is_the_dense_step(
    build, trained, make_batch, run_loss, run_predict, total
):
    dense, checkpoint = trained()
    dense_optimizer = adamw(dense, lr=0.01)
    dense_optimizer.load_state_dict(checkpoint["optimizer"])
    dense_optimizer.param_groups[0]["lr"] = 0.01
    detector = build(moe=COPIES)
    optimizer = adamw(detector, lr=0.01)  # the rate is that of the new training
    sentence = start(detector, checkpoint, optimizer)
    batch = make_batch([0, 1], seed=7)
    for ours, theirs in zip(
        run_predict(detector, batch), run_predict(dense, batch), strict=True
    ):
        torch.testing.assert_close(
            ours.pred_instances.scores, theirs.pred_instances.scores
        )
    backward(dense, make_batch, run_loss, total, seed=5)
    gradients = {n: p.grad for n, p in dense.named_parameters() if p.grad is not None}
    routers = []
    for name, parameter in detector.named_parameters():
        if ".moe.router." in name:
            routers.append(name)
        else:
            parameter.grad = expected_of(gradients, name).clone()
    dense_optimizer.step()
    optimizer.step()
    weights = dict(dense.named_parameters())
    for name, parameter in detector.named_parameters():
        if name not in routers:
            assert torch.equal(parameter, expected_of(weights, name)), name
    assert sentence.endswith(f"of dense.pth; without: {', '.join(routers)}")
    assert len(routers) == 2
    assert all(detector.get_parameter(name) not in optimizer.state for name in routers)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {3.0}  # two of the dense training


@pytest.mark.parametrize(
    ("moe", "optimizer"),
    [(None, adamw), (COPIES, adamw), (FINE, adamw), (COPIES, muon)],
    ids=["dense", "copies", "fine", "muon"],
)
def test_the_same_detector_takes_all_over(build, trained, moe, optimizer):
    _, checkpoint = trained(moe, optimizer)
    again = build(moe=moe)
    optimizer = optimizer(again)
    start(again, checkpoint, optimizer)
    stored = checkpoint["optimizer"]["state"]
    found = optimizer.state_dict()["state"]
    assert found.keys() == stored.keys()
    for index, state in stored.items():
        for key, value in state.items():
            assert torch.equal(found[index][key], value)


def test_names_and_not_places_decide(build, trained):
    """Groups in another order, as paramwise_cfg may put them."""
    _, checkpoint = trained()
    again = build(moe=None)
    named = list(reversed(dict(again.named_parameters()).items()))
    optimizer = torch.optim.AdamW([dict(params=[p]) for _, p in named])
    start(again, checkpoint, optimizer)
    names = checkpoint["meta"]["optimizer_names"]
    for index, state in checkpoint["optimizer"]["state"].items():
        parameter = dict(named)[names[index]]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state["exp_avg"])


def test_rows_of_other_classes_start_without(model_config, trained):
    from mmdet.registry import MODELS

    from damex.engine.checkpoint import replace_misfits

    _, checkpoint = trained()
    config = model_config(moe=None)
    config.bbox_head.num_classes = 6
    other = MODELS.build(config)
    replace_misfits(checkpoint["state_dict"], other)
    optimizer = adamw(other)
    start(other, checkpoint, optimizer)
    without = [n for n, p in other.named_parameters() if p not in optimizer.state]
    assert "bbox_head.cls_branches.0.weight" in without
    assert "decoder.layers.0.ffn.layers.0.0.weight" not in without


def test_momentum_is_taken_over_too(build, trained):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    _, checkpoint = trained(optimizer=sgd)
    detector = build(moe=COPIES)
    optimizer = sgd(detector)
    start(detector, checkpoint, optimizer)
    names = checkpoint["meta"]["optimizer_names"]
    source = names.index("decoder.layers.2.ffn.layers.1.weight")
    momentum = checkpoint["optimizer"]["state"][source]["momentum_buffer"]
    found = optimizer.state[moe_blocks(detector)[1].moe.experts.w2_EHD]
    assert torch.equal(found["momentum_buffer"][2], momentum.t())


def test_an_optimizer_of_their_own_for_the_experts(build, trained):
    """Normalised gradient descent keeps nothing, and AdamW gets its moments."""
    _, checkpoint = trained(optimizer=lambda d: adamw(d, amsgrad=False))
    detector = build(moe=COPIES)
    wrapper = build_optim_wrapper(
        detector,
        dict(
            constructor="ExpertOptimWrapperConstructor",
            optimizer=dict(type="AdamW", lr=0.01),
            experts=dict(type="NormalizedGD", lr=0.5),
        ),
    )
    start(detector, checkpoint, wrapper.optimizer)
    state = wrapper.optimizer.optimizers[0].state
    names = {n for n, p in detector.named_parameters() if p not in state}
    assert {".moe." in name for name in names} == {True}
    assert len(names) == 2 * (4 + 1)
    for parameter in detector.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrapper.step()
    assert state[detector.decoder.layers[1].ffn.layers[1].weight]["step"] == 3


def refusal(checkpoint, detector, optimizer):
    with pytest.raises(ConfigError) as error:
        load_moments(checkpoint, detector, optimizer, path="dense.pth")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_taken_over_is_said_in_one_line(build, trained):
    _, checkpoint = trained(optimizer=lambda d: adamw(d, amsgrad=False))
    detector = build(moe=COPIES)
    assert "which kept step, exp_avg, exp_avg_sq but not max_exp" in refusal(
        checkpoint, detector, adamw(detector)
    )
    plain = adamw(detector, amsgrad=False)
    unnamed = {**checkpoint, "meta": {}}
    assert "holds no parameter names" in refusal(unnamed, detector, plain)
    bare = {k: v for k, v in checkpoint.items() if k != "optimizer"}
    assert "dense.pth holds no optimizer" in refusal(bare, detector, plain)
    other = torch.optim.Adagrad(detector.parameters())
    assert "is Adagrad; use one" in refusal(checkpoint, detector, other)


@pytest.fixture
def make_runner(make_runner):
    def make(*args, **options):
        runner = make_runner(*args, **options)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        schedulers = runner.build_param_scheduler(runner.param_schedulers)
        runner.param_schedulers = schedulers
        return runner

    return make


def test_a_run_starts_from_the_checkpoint_of_another_run(
    make_runner, make_batch, run_loss, total
):
    """Through the files and options of two whole configs."""
    dense = make_runner(moe="dense")
    dense.model.init_weights()
    backward(dense.model, make_batch, run_loss, total, seed=0)
    dense.optim_wrapper.step()
    dense.save_checkpoint(dense.work_dir, "dense.pth", by_epoch=False)
    path = f"{dense.work_dir}/dense.pth"
    ffn = dense.model.decoder.layers[0].ffn.layers
    theirs = dense.optim_wrapper.optimizer.state[ffn[0][0].weight]["exp_avg"]
    assert theirs.any()
    for is_wanted in (True, False):
        runner = make_runner(load_from=path, load_optimizer=is_wanted)
        runner.load_or_resume()
        w1_EDH = moe_blocks(runner.model)[0].moe.experts.w1_EDH
        state = runner.optim_wrapper.optimizer.state
        assert (w1_EDH in state) == is_wanted
        if is_wanted:
            assert torch.equal(state[w1_EDH]["exp_avg"][1].t(), theirs)
    # A resumed run loads all of the optimizer in any case.
    resumed = make_runner(moe="dense", load_from=path, resume=True, load_optimizer=True)
    resumed.load_or_resume()
    assert len(resumed.optim_wrapper.optimizer.state) > 0


def test_options_that_cannot_work_are_rejected(make_runner):
    with pytest.raises(ConfigError, match="load_optimizer must be True or False, got"):
        make_runner(load_optimizer="yes")
    with pytest.raises(ConfigError, match=r"load_optimizer=True .*; set load_from="):
        make_runner(load_optimizer=True).train()
    averaged = "custom_hooks = [dict(type='EMAHook')]\n"
    averaged += "moe = dict(upcycling=dict(share=0.5))"
    with pytest.raises(ConfigError, match=r"moe.upcycling and EMAHook cannot"):
        make_runner(averaged).train()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def in_groups(model):
    return torch.optim.AdamW([dict(params=[p]) for p in model.parameters()], **ADAMW)


def in_another_order(model):
    return torch.optim.AdamW(reversed([*model.parameters()]), **ADAMW)


def fewer(model):
    return torch.optim.AdamW([*model.parameters()][1:], **ADAMW)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (sgd, "optimizer is SGD, and a.pth was trained with another kind, whose"),
        (in_groups, "trained with 2 parameters in 1 groups, not 2 in 2;"),
        (fewer, "trained with 2 parameters in 1 groups, not 1 in 1;"),
        (in_another_order, "trained with its parameters in another order;"),
    ],
)
def test_another_optimizer_is_not_resumed(optimizer, words):
    model = torch.nn.Linear(2, 1)
    meta = dict(epoch=1, iter=3, optimizer_names=["weight", "bias"])
    saved = dict(optimizer=adamw(model).state_dict(), meta=meta)
    check = partial(check_resumable, model=model, has_schedules=False)
    check(saved, optim_wrapper=OptimWrapper(adamw(model)), path="a.pth")
    with pytest.raises(ConfigError, match=words):
        check(saved, optim_wrapper=OptimWrapper(optimizer(model)), path="a.pth")
    (group,) = saved["optimizer"]["param_groups"]
    for name in ("decoupled_weight_decay", "fused", "foreach"):  # as of an older torch
        group.pop(name, None)
    group["initial_lr"] = 1e-3
    check(saved, optim_wrapper=OptimWrapper(adamw(model)), path="a.pth")
    bare = {key: value for key, value in saved.items() if key != "optimizer"}
    for content, missing in ((saved, "param_schedulers"), (bare, "optimizer and no p")):
        with pytest.raises(ConfigError, match=f"a.pth holds no {missing}"):
            check_resumable(
                content,
                model,
                OptimWrapper(adamw(model)),
                path="a.pth",
                has_schedules=True,
            )
    several = OptimWrapperDict(a=OptimWrapper(adamw(model)))
    check(saved, optim_wrapper=several, path="a.pth")
    del saved["meta"]["epoch"]
    with pytest.raises(ConfigError, match="does not contain the progress"):
        check(saved, optim_wrapper=OptimWrapper(adamw(model)), path="a.pth")


def test_parameters_outside_of_the_model_are_refused_before_the_first_step(make_runner):
    outside = torch.nn.Parameter(torch.ones(2, 3))

    @OPTIM_WRAPPER_CONSTRUCTORS.register_module(name="Outside", force=True)
    class Outside(DefaultOptimWrapperConstructor):
        def __call__(self, model):
            wrapper = super().__call__(model)
            wrapper.optimizer.add_param_group(dict(params=[outside]))
            return wrapper

    with pytest.raises(ConfigError, match=r"has 1 parameters .* shape \(2, 3\)"):
        make_runner("optim_wrapper = dict(constructor='Outside')")
