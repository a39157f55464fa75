"""Compare mixtures of experts over seeds: ``python tools/compare_moe.py CONFIG``."""

from __future__ import annotations

import sys

from damex.analysis.compare import compare_moe
from damex.engine.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(compare_moe))
