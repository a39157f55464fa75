import ast
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.autograd import gradcheck

from damex.compat import (
    EXTENSION,
    OPS,
    OpsReport,
    OpsStub,
    ensure_ops,
    kernels,
    rebind_fallbacks,
)
from damex.compat.kernels import attend, deformable_attention, fused_attention


def wrapper(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns one file of mmcv.ops, bound to the stub in any environment."""
    import mmcv.ops  # noqa: F401

    module = sys.modules[f"mmcv.ops.{name}"]
    monkeypatch.setattr(module, "ext_module", OpsStub("test"))
    return module


# ---- which ops are in use ----


def fake_mmcv(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Puts a package mmcv with these files first on the path."""
    package = folder / "mmcv"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    for name in [name for name in sys.modules if name.split(".")[0] == "mmcv"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("mmcv", EXTENSION):
        # Set and taken out, so that the end takes out what ensure_ops puts in.
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("damex.compat.rebind_fallbacks", lambda: None)


NO_OPS = "mmcv was installed without compiled ops"


@pytest.mark.parametrize(
    ("files", "expected", "words"),
    [
        (dict(ops="", _ext="nms = 1"), OpsReport("compiled"), "mmcv ops: compiled"),
        (
            dict(ops="", _ext="raise ImportError('undefined symbol: _ZN')"),
            OpsReport("stub", "mmcv's compiled ops do not load: undefined symbol: _ZN"),
            "undefined symbol",
        ),
        (dict(ops=""), OpsReport("stub", NO_OPS), "nms, roi_align, sigmoid_f"),
        ({}, OpsReport("absent", "mmcv-lite has no mmcv.ops"), "mmcv ops: absent (m"),
    ],
)
def test_ops_in_use(tmp_path, monkeypatch, files, expected, words):
    fake_mmcv(tmp_path, monkeypatch, **files)
    assert ensure_ops() == expected
    assert words in expected.summary()
    module = sys.modules.get(EXTENSION)
    assert isinstance(module, OpsStub) == (expected.kind == "stub")
    assert hasattr(module, "nms") == (expected.kind != "absent")
    assert ensure_ops() == expected  # another call changes nothing
    assert sys.modules.get(EXTENSION) is module


def test_loaded_ops_are_left_alone_and_a_missing_mmcv_is_absent(monkeypatch):
    compiled = ModuleType(EXTENSION)
    monkeypatch.setitem(sys.modules, EXTENSION, compiled)
    assert ensure_ops() == OpsReport("compiled")
    assert sys.modules[EXTENSION] is compiled
    monkeypatch.delitem(sys.modules, EXTENSION)
    monkeypatch.setitem(sys.modules, "mmcv", None)
    assert ensure_ops() == OpsReport("absent", "mmcv is not installed")


def test_choosing_the_ops_is_light_and_the_registry_loads_no_tools(run_python):
    """What mmdet loads itself, such as matplotlib, is no fault of damex."""
    code = """
import sys
from damex.compat import ensure_ops
ensure_ops()
compiled = not hasattr(sys.modules["mmcv._ext"], "reason")
assert compiled or "torch" not in sys.modules, "damex imported torch"
import mmdet.models
from mmcv.utils.ext_loader import load_ext
if not compiled:
    try:
        load_ext("_ext", ["three_nn_forward"]).three_nn_forward(1, b=2)
    except RuntimeError as error:
        assert "'three_nn_forward'" in str(error) and "pip install" in str(error)
    else:
        raise SystemExit("a missing op did not raise")
import mmdet.engine, mmdet.visualization
before = {*sys.modules}
import damex.registry
new = {*sys.modules} - before
tools = {"cyclopts", "jinja2", "matplotlib", "onnx", "onnxruntime", "transformers"}
assert not tools & {name.partition(".")[0] for name in new}
assert not {name for name in new if name.startswith("damex.workbench.cli")}
"""
    run_python("-c", code)
    run_python("-c", "import damex.registry")  # as the first import


@pytest.mark.slow
def test_every_module_that_needs_mmdet_can_be_the_first_import(run_python):
    """Each in a process of its own, which has imported torch and mmengine alone."""
    code = """
import os, sys
import mmengine.runner, torchvision
assert not {"damex", "mmcv", "mmdet"} & {*sys.modules}
names = "evaluation models.blocks engine.runner datasets.coco"
for name in (*names.split(), "workbench.headroom.command"):
    if not (child := os.fork()):
        __import__("damex." + name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    run_python("-c", code)


# ---- modules imported too early ----


def test_fallback_of_an_early_module_is_replaced(tmp_path, monkeypatch):
    source = (
        "try:\n"
        "    from mmcv.ops.nms import batched_nms as suppress, soft_nms\n"
        "except ImportError:\n"
        "    suppress = None\n"
        "try:\n"
        "    from mmcv.ops import op_of_another_mmcv\n"
        "except ImportError:\n"
        "    op_of_another_mmcv = None\n"
        "from os import path as kept\n"
    )
    (tmp_path / "early.py").write_text(source)
    early = ModuleType("mmdet.early")
    early.__file__ = str(tmp_path / "early.py")
    other = object()
    vars(early).update(suppress=None, op_of_another_mmcv=None, kept=other)
    monkeypatch.setitem(sys.modules, "mmdet.early", early)

    rebind_fallbacks()

    import mmcv.ops

    assert early.suppress is mmcv.ops.batched_nms
    assert early.soft_nms is mmcv.ops.soft_nms
    assert early.op_of_another_mmcv is None
    assert early.kept is other


# ---- the stub as a module ----


def test_every_provided_op_has_its_kernel():
    for name in OPS:
        names = {name, f"{name}_forward"} & {*vars(kernels)}
        assert len(names) == 1
        assert name in names or callable(getattr(kernels, f"{name}_backward"))


# ---- deformable attention ----


def attention_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Two images, two levels of 3 x 4 and 2 x 2, 2 heads, 3 channels, 2 points."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 16, 2, 3, generator=generator, dtype=dtype)
    # Beyond 0..1 on purpose: outside of the image the features are zero.
    points = torch.rand(2, 5, 2, 2, 2, 2, generator=generator, dtype=dtype) * 1.4 - 0.2
    weights = torch.rand(2, 5, 2, 2, 2, generator=generator, dtype=dtype)
    shapes, starts = torch.tensor([[3, 4], [2, 2]]), torch.tensor([0, 12])
    return [value, shapes, starts, points, weights]


@pytest.fixture(params=["cuda", "cpu"])
def no_deformops(monkeypatch, request):
    monkeypatch.setattr(kernels, "GPU", request.param)
    monkeypatch.setitem(sys.modules, "deformops", None)
    kernels.fused_problem.cache_clear()


@pytest.mark.usefixtures("no_deformops")
def test_attention_gradients_are_those_of_the_reference():
    """On the CPU, and in the way of a GPU without deformops."""
    value, shapes, _, points, weights = attention_inputs(torch.float64)
    floats = [one.requires_grad_() for one in (value, points, weights)]
    args = (value, shapes, points, weights)
    assert gradcheck(attend, args)

    output = attend(*args)
    expected = reference_attention()(*args)
    torch.testing.assert_close(output, expected)
    upstream = torch.linspace(-1, 1, output.numel()).double().view_as(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, floats, upstream),
        torch.autograd.grad(expected, floats, upstream),
    )


def reference_attention() -> Callable[..., torch.Tensor]:
    """Returns mmcv's own function, from its source: damex may have replaced it."""
    from mmcv.ops import multi_scale_deform_attn as of_mmcv

    name = "multi_scale_deformable_attn_pytorch"
    tree = ast.parse(inspect.getsource(of_mmcv))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == name]
    names = {"torch": torch, "F": torch.nn.functional}
    exec(compile(tree, "mmcv", "exec"), names)
    return names[name]


def test_layers_of_a_detector_use_this_attention(monkeypatch):
    from mmcv.ops import multi_scale_deform_attn as in_use

    import damex.models  # noqa: F401 - replaces mmcv's function

    assert in_use.multi_scale_deformable_attn_pytorch is attend
    # The name that a layer calls on a GPU, for an mmcv without and with compiled ops.
    compiled = object()
    for is_compiled in (True, False):
        monkeypatch.setattr(in_use, "MultiScaleDeformableAttnFunction", compiled)
        kernels.use_in_mmcv(is_compiled=is_compiled)
        function = in_use.MultiScaleDeformableAttnFunction
        assert (function is compiled) == is_compiled
    value, shapes, starts, points, weights = attention_inputs(torch.float32)
    torch.testing.assert_close(
        function.apply(value, shapes, starts, points, weights, 64),
        reference_attention()(value, shapes, points, weights),
    )


@pytest.mark.usefixtures("no_deformops")
def test_attention_keeps_half_precision_outside_only():
    value, shapes, _, points, weights = attention_inputs(torch.float32)
    half = value.half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(half, shapes, points, weights)
    assert output.dtype == torch.float16
    exact = reference_attention()(half.detach().float(), shapes, points, weights)
    # Half an ulp of float16 below 4 is 2 ** -10; bfloat16 inside would miss by 2 ** -7.
    torch.testing.assert_close(output.float(), exact, rtol=0, atol=2**-10)
    output.float().sum().backward()
    assert half.grad.dtype == torch.float16
    assert half.grad.abs().sum() > 0


# ---- deformable attention of deformops ----

# Its torch backend takes the place of the kernels, which need a GPU.
needs_deformops = pytest.mark.skipif(
    find_spec("deformops") is None, reason="deformops is not installed: damex[gpu]"
)


@pytest.fixture
def log_of_gpu(monkeypatch):
    """Treats the CPU as a GPU that no tensor has met; yields what is logged."""
    lines = []
    monkeypatch.setattr(kernels, "GPU", "cpu")
    monkeypatch.setattr(
        "mmengine.logging.print_log", lambda line, *_: lines.append(line)
    )
    for cached in (kernels.fused_problem, kernels.log_choice):
        cached.cache_clear()
    yield lines
    for cached in (kernels.fused_problem, kernels.log_choice):
        cached.cache_clear()


def encoder_inputs(device: str, *sizes: tuple[int, int]) -> list[torch.Tensor]:
    """One image, 8 heads of 32 channels, 4 points; a query for every position."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.tensor(sizes)
    tokens, levels = int(shapes.prod(1).sum()), len(sizes)
    value = torch.randn(1, tokens, 8, 32, generator=generator)
    points = torch.rand(1, tokens, 8, levels, 4, 2, generator=generator) * 1.2 - 0.1
    weights = torch.randn(1, tokens, 8, levels * 4, generator=generator).softmax(-1)
    weights = weights.view(1, tokens, 8, levels, 4)
    return [one.to(device) for one in (value, shapes, points, weights)]


def with_gradients(
    compute: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Returns output and gradients in float32, of features and weights in a dtype."""
    value, points, weights = (inputs[place].clone() for place in (0, 2, 3))
    value, weights = value.to(dtype), weights.to(dtype)
    leaves = [one.requires_grad_() for one in (value, points, weights)]
    output = compute(value, inputs[1], points, weights)
    assert output.dtype == dtype
    upstream = torch.linspace(-1, 1, output.numel(), device=output.device)
    upstream = upstream.view_as(output).to(dtype)
    found = [output, *torch.autograd.grad(output, leaves, upstream)]
    return [one.detach().float() for one in found]


def largest_errors(
    found: list[torch.Tensor], expected: list[torch.Tensor]
) -> list[float]:
    """Returns the largest differences, relative to the largest expected number."""
    return [
        float((one - two).abs().max() / two.abs().max())
        for one, two in zip(found, expected, strict=True)
    ]


@needs_deformops
@pytest.mark.filterwarnings("ignore:The 'cuda' backend:RuntimeWarning")
def test_deformops_takes_over_on_a_gpu_and_answers_as_torch(log_of_gpu, monkeypatch):
    inputs = encoder_inputs("cpu", (12, 16), (6, 8), (3, 4), (2, 2))
    calls = []
    monkeypatch.setattr(
        kernels,
        "fused_attention",
        lambda *args: calls.append(len(args)) or fused_attention(*args),
    )
    found = with_gradients(attend, inputs)
    assert len(calls) == 2  # a small case first
    expected = with_gradients(deformable_attention, inputs)
    # Measured: below 1e-6.
    assert max(largest_errors(found, expected)) < 5e-6
    with torch.inference_mode():  # memory that was made here has no gradients
        kernels.fused_problem.cache_clear()
        torch.testing.assert_close(attend(*inputs), expected[0], rtol=0, atol=1e-5)
    assert log_of_gpu == ["deformable attention on the GPU: deformops"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "deformops is missing: pip install 'damex[gpu]' (Python 3.12 or 3.13)"),
        (
            "def msda(*_, **__): raise RuntimeError('no kernel\\nfor sm_37')",
            "deformops fails: RuntimeError: no kernel for sm_37",
        ),
        (
            "def msda(value, shapes, starts, points, weights, **_):\n"
            "    from damex.compat.kernels import deformable_attention\n"
            "    found = deformable_attention(value, shapes, points, weights)\n"
            "    return found + value.detach().mean() * 0.1",
            "deformops fails: AssertionError: Tensor-likes are not close!",
        ),
    ],
)
def test_without_a_working_deformops_torch_goes_on_and_one_line_says_so(
    log_of_gpu, monkeypatch, tmp_path, code, words
):
    for name in ("deformops", "deformops.registry"):
        monkeypatch.setitem(sys.modules, name, None)
        if code is not None:  # set and taken out: the end takes out what is imported
            del sys.modules[name]
    if code is not None:
        (tmp_path / "deformops").mkdir()
        (tmp_path / "deformops" / "__init__.py").touch()
        (tmp_path / "deformops" / "registry.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
    inputs = encoder_inputs("cpu", (4, 5), (2, 3))
    expected = with_gradients(deformable_attention, inputs)
    for _ in range(2):
        torch.testing.assert_close(with_gradients(attend, inputs), expected)
    if code is None:  # the same reason for every dtype
        attend(inputs[0].bfloat16(), *inputs[1:])
    assert len(log_of_gpu) == 1
    assert words in log_of_gpu[0]
    assert "\n" not in log_of_gpu[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a GPU")
@needs_deformops
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_cuda_kernels_of_deformops_answer_as_torch_in_an_encoder(dtype, limit):
    assert kernels.fused_problem(torch.device("cuda", 0), dtype, 32) == ""
    inputs = encoder_inputs("cuda", (100, 167), (50, 84), (25, 42), (13, 21))
    found = with_gradients(fused_attention, inputs, dtype)
    expected = with_gradients(deformable_attention, inputs, dtype)
    # Points within rounding of the middle of a pixel have either slope.
    slopes, others = found.pop(2), expected.pop(2)
    errors = (slopes - others).abs().flatten()
    usual = errors.kthvalue(int(0.999 * len(errors))).values
    assert max(*largest_errors(found, expected), usual / others.abs().max()) < limit


# ---- focal loss ----


@pytest.mark.parametrize(
    ("reduction", "gamma"), [("none", 2.0), ("mean", 1.5), ("sum", 2.0)]
)
def test_focal_loss_is_that_of_mmdet(monkeypatch, reduction, gamma):
    from mmdet.models.losses.focal_loss import py_sigmoid_focal_loss

    focal = wrapper("focal_loss", monkeypatch)
    generator = torch.Generator().manual_seed(1)
    logits = 8 * torch.randn(6, 3, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    target = torch.tensor([0, 1, 2, 3, 0, 3])
    one_hot = torch.nn.functional.one_hot(target, 4)[:, :3]
    loss = focal.sigmoid_focal_loss(logits, target, gamma, 0.3, None, reduction)
    expected = py_sigmoid_focal_loss(
        logits, one_hot, gamma=gamma, alpha=0.3, reduction="none"
    )
    # mmcv's mean is over rows, mmdet's over all entries.
    if reduction != "none":
        expected = expected.sum() / (6 if reduction == "mean" else 1)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), logits),
        torch.autograd.grad(expected.sum(), logits),
    )


@pytest.mark.parametrize(
    ("logits", "gamma", "loss", "slope"),
    [
        # Both are wrong: the losses are 3/4 * 40 and 1/4 * 40, the slopes 3/4 and -1/4.
        ([40.0, -40.0], 2.0, [30.0, 10.0], [0.75, -0.25]),
        # It is of the order of exp(-40) ** 1.5; torchvision's loss gives nan here.
        ([-40.0, 40.0], 0.5, [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_focal_loss_of_sure_answers(monkeypatch, logits, gamma, loss, slope):
    focal = wrapper("focal_loss", monkeypatch)
    logits_RC = torch.tensor([logits], requires_grad=True)
    found = focal.sigmoid_focal_loss(
        logits_RC, torch.tensor([1]), gamma, 0.25, None, "none"
    )
    torch.testing.assert_close(found, torch.tensor([loss]))
    (slopes,) = torch.autograd.grad(found.sum(), logits_RC)
    torch.testing.assert_close(slopes, torch.tensor([slope]))


def test_focal_loss_weight_is_that_of_the_target_class(monkeypatch):
    focal = wrapper("focal_loss", monkeypatch)
    logits = torch.zeros(3, 2, requires_grad=True)
    target, weight = torch.tensor([1, 0, 2]), torch.tensor([5.0, 7.0])
    plain = focal.sigmoid_focal_loss(logits, target, 2.0, 0.25, None, "none")
    loss = focal.sigmoid_focal_loss(logits, target, 2.0, 0.25, weight, "none")
    rows = torch.tensor([[7.0], [5.0], [1.0]])  # background weighs one
    torch.testing.assert_close(loss, plain * rows)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), logits)[0],
        torch.autograd.grad(plain.sum(), logits)[0] * rows,
    )


# ---- RoIAlign ----


@pytest.mark.parametrize(("aligned", "first"), [(True, 113.5), (False, 118.0)])
def test_roi_align_by_hand(monkeypatch, aligned, first):
    roi_align = wrapper("roi_align", monkeypatch).roi_align
    ramp = torch.arange(48.0).view(1, 1, 6, 8)  # 8 y + x
    rois = torch.tensor([[1.0, 2.0, 2.0, 14.0, 10.0]])  # x 1..7, y 1..5 at half scale
    features = torch.cat((ramp, 100 + ramp))
    output = roi_align(features, rois, (2, 3), 0.5, 0, "avg", aligned)
    # Bins are 2 wide and 2 high; their middles are x 2, 4, 6 and y 2, 4. Aligned, pixel
    # centres lie at half coordinates, so the first is 8 * 1.5 + 1.5 = 13.5.
    expected = first + torch.tensor([[0.0, 2.0, 4.0], [16.0, 18.0, 20.0]])
    torch.testing.assert_close(output[0, 0], expected)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_roi_align_gradient(monkeypatch, sampling_ratio):
    roi_align = wrapper("roi_align", monkeypatch).roi_align
    features = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[1, 0.3, 0.7, 9.1, 7.9], [0, 2, 2, 5, 9]]).double()
    assert gradcheck(
        lambda x: roi_align(x, rois, (2, 3), 0.5, sampling_ratio, "avg", True), features
    )


# ---- non-maximum suppression ----


def test_nms_of_limits_pixels_nothing_and_half_precision(monkeypatch):
    ops, scores = wrapper("nms", monkeypatch), torch.tensor([0.9, 0.8])

    def kept(second, threshold, **more):
        boxes = torch.tensor([[0.0, 0, 2, 2], second])
        return ops.nms(boxes, scores, threshold, **more)[1].tolist()

    # Offset 0: 2 / 6 = 0.33. Offset 1, three pixels wide: 6 / 12 = 0.5.
    assert kept([1, 0, 3, 2], 0.4, offset=0) == [0, 1]
    assert kept([1, 0, 3, 2], 0.4, offset=1) == [0]
    assert kept([0, 0, 2, 1], 0.5) == [0, 1]  # 2 / 4 is not above
    assert kept([0, 0, 2, 1], 0.49) == [0]
    dets, none = ops.nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
    assert (dets.shape, none.dtype, len(none)) == ((0, 5), torch.int64, 0)
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2]]).half()
    assert ops.nms(boxes, torch.tensor([0.1, 0.2]).half(), 0.5)[1].tolist() == [1]
