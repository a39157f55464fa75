import io

from rich.console import Console

from damex.studies.progress import StudyProgress


def lines_of(items, **kwargs):
    """What is printed when every item takes ten seconds."""
    ticks = iter(range(0, 1000, 10))
    screen = io.StringIO()
    progress = StudyProgress(
        Console(file=screen), every_seconds=20, clock=lambda: next(ticks)
    )
    assert list(progress.track(items, "train", **kwargs)) == [0, 1, 2, 3, 4]
    return screen.getvalue().splitlines()


def test_a_pipe_gets_a_line_now_and_then_and_one_at_the_end():
    assert lines_of(range(5)) == [
        "  train: 2/5, 30 s left",
        "  train: 4/5, 10 s left",
        "  train: 5/5, 0 s left",
    ]


def test_without_a_known_number_no_time_is_promised():
    assert lines_of(iter(range(5))) == ["  train: 2", "  train: 4"]
    assert lines_of(iter(range(5)), total=5)[0] == "  train: 2/5, 30 s left"


def test_a_terminal_gets_a_bar():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    assert list(StudyProgress(console).track([7, 8], "fit")) == [7, 8]
    assert "fit" in screen.getvalue()
    assert "100%" in screen.getvalue()
