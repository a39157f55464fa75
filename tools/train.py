"""Train a detector: ``python tools/train.py CONFIG``; arguments as in mmdet."""

from __future__ import annotations

import sys

from damex.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
