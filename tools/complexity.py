"""Parameters and FLOPs, total and active: ``python tools/complexity.py CONFIG``."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["complexity", *sys.argv[1:]]))
