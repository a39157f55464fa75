"""``python -m damex COMMAND``: what ``tools/`` does, from an installed package too."""

from __future__ import annotations

import sys
from importlib import import_module

from damex.engine.cli import run_command

COMMANDS = {
    "train": "damex.engine.cli",
    "test": "damex.engine.cli",
    "compare_moe": "damex.analysis.compare",
    "headroom": "damex.analysis.headroom",
    "zero_ffns": "damex.analysis.ablations",
    "tell_datasets": "damex.analysis.ablations",
    "complexity": "damex.analysis.complexity",
    "data": "damex.curation.commands",
}


def main() -> int:
    """Run the command that the first argument names; returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        commands = ",".join(COMMANDS)
        sys.stderr.write(f"usage: python -m damex {{{commands}}} [--help] ...\n")
        return 0 if name in ("-h", "--help") else 2
    command = getattr(import_module(COMMANDS[name]), name)
    return run_command(command, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
