"""Processes side by side: what is kept, what is handed over, what is cleaned up."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from damex.analysis.runs import Run, run_all
from damex.errors import ConfigError


def test_a_run_without_its_evaluation_has_not_finished(tmp_path):
    summary = dict(datasets={}, command="train.py config.py --cfg-options a=1")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    scored = Run("config.py", tmp_path, ("a=1",), is_scored=True)
    assert scored.summary() is None
    assert Run("config.py", tmp_path, ("a=1",)).summary() == summary


def test_a_run_of_other_inputs_is_refused(tmp_path):
    summary = dict(datasets={"a": {}}, command="damex zero_ffns config.py one.pth")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    same = Run("config.py", tmp_path, command="zero_ffns", inputs=("one.pth",))
    assert same.summary() == summary
    other = Run("config.py", tmp_path, command="zero_ffns", inputs=("two.pth",))
    with pytest.raises(ConfigError, match="belongs to a run with other settings"):
        other.summary()


@dataclass(frozen=True)
class Sleeper:
    """Stands in for a Run: sleeps, and its status is the number of threads."""

    seconds: float

    def start(self, *, threads):
        code = f"import time; time.sleep({self.seconds}); raise SystemExit({threads})"
        return subprocess.Popen([sys.executable, "-c", code])


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ends_come_in_their_order_with_their_status():
    slow, fast = Sleeper(3.0), Sleeper(0.0)
    assert list(run_all([slow, fast], jobs=2, threads=7)) == [(fast, 7), (slow, 7)]
    assert list(run_all([slow, fast], jobs=1, threads=7)) == [(slow, 7), (fast, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_training_outlives_the_command(number):
    script = """if True:
        import signal, subprocess, sys
        from damex.analysis.runs import run_all

        # Where tests run in a shell's background, Ctrl-C is ignored from the start.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class Announced:
            def start(self, *, threads):
                process = subprocess.Popen(["sleep", "60"])
                print(process.pid, flush=True)
                return process

        list(run_all([Announced(), Announced()], jobs=2, threads=1))
    """
    command = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    children = [int(command.stdout.readline()) for _ in range(2)]
    time.sleep(0.2)  # into the pool's waiting
    assert all(is_alive(child) for child in children)
    command.send_signal(number)
    assert command.wait(timeout=20) != 0
    assert not any(is_alive(child) for child in children)


def test_the_callers_handler_of_sigterm_is_back_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    list(run_all([Sleeper(0.0)], jobs=1, threads=1))
    assert signal.getsignal(signal.SIGTERM) is before
