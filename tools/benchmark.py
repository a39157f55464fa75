"""Layers of experts, timed: ``python tools/benchmark.py``."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
