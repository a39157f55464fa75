"""Train a detector: ``python tools/train.py CONFIG``; arguments as in mmdet."""

from __future__ import annotations

import sys

from damex.engine.cli import run_command, train

if __name__ == "__main__":
    sys.exit(run_command(train))
