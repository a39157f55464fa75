"""Parameters and FLOPs, total and active: ``python tools/complexity.py CONFIG``."""

from __future__ import annotations

import sys

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)

# isort: split
from damex.analysis.complexity import complexity
from damex.engine.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(complexity))
