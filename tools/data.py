"""Ask about datasets before a training: ``python tools/data.py COMMAND``."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["data", *sys.argv[1:]]))
