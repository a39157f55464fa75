"""Evaluate a checkpoint: ``python tools/test.py CONFIG CHECKPOINT``; as in mmdet."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["test", *sys.argv[1:]]))
