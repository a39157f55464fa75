"""Train the headroom ladder of a config: ``python tools/headroom.py CONFIG``."""

from __future__ import annotations

import sys

from damex.analysis.headroom import headroom
from damex.engine.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(headroom))
