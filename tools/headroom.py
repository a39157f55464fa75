"""Train the headroom ladder of a config: ``python tools/headroom.py CONFIG``."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["headroom", *sys.argv[1:]]))
