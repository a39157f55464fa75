"""Deformable attention, timed: which rows the report has."""

from importlib.util import find_spec

from tools.analysis import attention


def test_report_has_a_row_for_every_way_and_dtype(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel\nfor sm_37")

    ways = attention.ways() | {"broken": broken}
    assert any("deformops" in way for way in ways) == bool(find_spec("deformops"))
    monkeypatch.setattr(attention, "ways", lambda: ways)
    monkeypatch.setattr(attention, "SMALL", ((4, 5), (2, 3)))
    report = tmp_path / "new" / "attention.md"
    attention.attention(out=str(report), small=True, seconds=0.001)
    lines = report.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]
    assert "26 tokens of 2 levels" in "\n".join(lines)
    expected = [[dtype, way] for dtype in ("float32", "bfloat16") for way in ways]
    assert [row[:2] for row in rows] == expected
    for _, way, forward, both, memory in rows:
        if way == "broken":
            assert (forward, both) == ("fails: no kernel for sm_37", "-")
        else:
            assert float(forward.removesuffix(" ms")) > 0
            assert float(both.removesuffix(" ms")) > 0
        assert memory == "-"
