"""Parameters and FLOPs, total and active: ``python tools/complexity.py CONFIG``."""

from __future__ import annotations

import sys

from damex.analysis.complexity import complexity
from damex.engine.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(complexity))
