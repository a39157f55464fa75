"""Evaluate a checkpoint: ``python tools/test.py CONFIG CHECKPOINT``; as in mmdet."""

from __future__ import annotations

import sys

from damex.engine.cli import run_command, test

if __name__ == "__main__":
    sys.exit(run_command(test))
