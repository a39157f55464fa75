"""The benchmark: baselines that do the same work, and a report."""

import pytest
import torch

from damex.errors import ConfigError
from damex.moe import FFNExperts, MoELayer
from tools.analysis import benchmark
from tools.analysis.benchmark import baselines_of, loop_over_experts

TINY = benchmark.Case(2, 24, 4, padding=0.25)


def damex_layer(k):
    baselines = baselines_of(4, k, width=8, hidden=16)
    return next(
        baseline.module
        for baseline in baselines
        if isinstance(baseline.module, MoELayer)
    )


@pytest.mark.parametrize("k", [1, 2])
def test_baselines_do_the_same_work(k):
    """The loop returns what the layer does; the dense FFN has the active size."""
    layer, tokens_BND = damex_layer(k), torch.randn(2, 5, 8)
    found, _ = layer(tokens_BND)
    expected_VD = loop_over_experts(layer, tokens_BND.flatten(0, 1))
    torch.testing.assert_close(found.flatten(0, 1), expected_VD)
    dense, *others = baselines_of(4, k, width=8, hidden=16)
    assert dense.module[0].out_features == 16 * k
    names = [baseline.name for baseline in others]
    assert ("damex: shared FFN, low-rank maps" in names) == (k == 1)


def test_tokens_go_where_the_case_says():
    case = benchmark.Case(3, 24, 2, by_dataset=True)
    tokens_BND, packing = benchmark._tokens(case, "cpu")
    assert packing.position_V is None
    assert tokens_BND[:, :, :2].argmax(-1).tolist() == [[0] * 24, [1] * 24, [0] * 24]
    _, packing = benchmark._tokens(TINY, "cpu")
    assert packing.position_V.tolist() == [*range(18), *range(24, 42)]


def test_what_a_dense_ffn_keeps_is_its_input_and_hidden_rows():
    timings = benchmark.run_case(TINY, True, 1, "cpu")
    assert timings[0].name == "dense FFN"
    assert timings[0].ratio == 1.0
    assert timings[0].saved == 2 * 24 * (256 + 2048) * 4
    inference = benchmark.run_case(TINY, False, 1, "cpu")
    assert [timing.saved for timing in inference] == [0] * len(timings)


def test_every_layer_has_its_turn_in_every_place(monkeypatch):
    order = []
    monkeypatch.setattr(benchmark, "_step", lambda layer, *_: layer.name)
    monkeypatch.setattr(
        benchmark, "_time", lambda step, device: order.append(step) or 1.0
    )
    names = [one.name for one in benchmark.run_case(TINY, False, 1, "cpu")]
    order.clear()
    benchmark.run_case(TINY, False, len(names) - 1, "cpu")  # and the warm-up
    for place in range(len(names)):
        assert {*order[place :: len(names)]} == {*names}


def test_a_layer_that_answers_wrongly_is_not_timed(monkeypatch):
    forward = FFNExperts.forward
    monkeypatch.setattr(
        FFNExperts,
        "forward",
        lambda self, rows, counts: forward(self, rows, counts) + 1,
    )
    with pytest.raises(ConfigError, match="nothing was timed"):
        benchmark.run_case(TINY, True, 1, "cpu")


def test_the_report_has_a_row_for_each_case(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "SMALL", (TINY, benchmark.Case(1, 8, 4, k=2)))
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "report.md"
    try:
        benchmark.app(["--small", "--rounds", "1", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    text = out.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| 2 x 24 tokens")]
    assert len(rows) == 3  # training, inference, memory
    for line in rows:
        assert line.startswith(
            "| 2 x 24 tokens, 25% padding, 4 experts, top-1, uniform"
        )
    assert "1.00 (" in rows[0]
    assert f"torch: {torch.__version__}" in text
    assert str(out) in capsys.readouterr().out


def test_work_of_several_threads_is_divided_by_their_number(monkeypatch):
    clock = iter([2.0, 8.0])
    monkeypatch.setattr(benchmark.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(benchmark.torch, "get_num_threads", lambda: 4)
    assert benchmark._time(lambda: None, "cpu") == (8.0 - 2.0) / 4
