"""Reproduce a source paper's experiments: ``python tools/study.py NAME``."""

from __future__ import annotations

import sys

from damex.engine.cli import run_command
from damex.studies.command import study

if __name__ == "__main__":
    sys.exit(run_command(study))
