import pytest

from damex.analysis.comparison_figure import draw_comparison


def row(name, values, mean, deviation):
    return dict(name=name, ap50_seeds=values, ap50=(mean, deviation))


def test_every_seed_is_a_dot_beside_its_name():
    rows = [
        row("dense", [0.2, 0.4], 0.3, 0.1),
        dict(name="failed", ap50_seeds=[], ap50=None),
        row("damex", [0.6], 0.6, None),
    ]
    axes = draw_comparison(rows).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense", "damex"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [[0.2, 0.4], [0.6]]
    assert [list(line.get_ydata()) for line in dots] == [[0, 0], [1]]
    band = axes.patches[0]
    assert band.get_x() == pytest.approx(0.2)
    assert band.get_width() == pytest.approx(0.2)


def test_nothing_finished_is_an_empty_picture():
    axes = draw_comparison([dict(name="failed", ap50_seeds=[], ap50=None)]).axes[0]
    assert not axes.lines
