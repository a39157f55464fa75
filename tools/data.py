"""Ask about datasets before a training: ``python tools/data.py COMMAND``."""

from __future__ import annotations

import sys

from damex.curation.commands import data
from damex.engine.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(data))
