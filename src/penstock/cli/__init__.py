"""The command `penstock`: inspect and change a store from a shell.

main          the program; every command connects, so it works beside an owner
commands      the commands
cluster       the commands of a cluster
certificates  keys and certificates for a server and for members
formatting    bytes as readable text
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command; a Penstock error prints one line and exits with code 1."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not behind nohup
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt during the imports just ends this process
    from penstock.cli.cluster import app
    from penstock.errors import PenstockError

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)  # the reader of our output, like `head`, closed it
