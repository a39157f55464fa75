"""Reproduce a source paper's experiments: ``python tools/study.py NAME``."""

from __future__ import annotations

import sys
from pathlib import Path

from damex.workbench.cli.run import run_command

sys.path.insert(0, str(Path(__file__).parents[1]))  # studies/ is not installed

from studies.harness import app

if __name__ == "__main__":
    sys.exit(run_command(app))
