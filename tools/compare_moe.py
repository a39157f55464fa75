"""Compare mixtures of experts over seeds: ``python tools/compare_moe.py CONFIG``."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["compare_moe", *sys.argv[1:]]))
