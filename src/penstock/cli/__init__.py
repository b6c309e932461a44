"""The command `penstock`: a look into a store, and a hand on it, from a shell.

main        the program; every command connects, so it works beside an owner
commands    what it can do
formatting  bytes as a person reads them
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; an error of Penstock's is one line and exit code 1."""
    from penstock.cli.commands import app
    from penstock.errors import PenstockError

    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(0)  # whoever read our output has seen enough
