"""The command ``damex``, also run by ``python -m damex`` and ``tools/*.py``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    from damex.workbench.cli.commands import app
    from damex.workbench.cli.run import run_command
except ModuleNotFoundError as error:
    sys.exit(f"damex: {error}; fix it with: pip install {error.name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument and return the exit status.

    The status is 2 for a mistake in the command line, a config or the data.
    """
    return run_command(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
