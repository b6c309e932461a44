"""The command `penstock`: look at a store, change it and serve it, from a shell.

`main`, here, runs it; an error is one line, and the exit code says what kind it is.

The program:

    program        imports the modules of commands, which registers them, and runs the one that was called
    app            its groups of commands, common options, and the configuration file
    configuration  `config show`: the value of every option, and where it comes from
    session        the store that a command is about, and its output

Data:

    tables         `init`, `table`: list, create, describe, compact, drop
    kv             `get`, `put`, `delete`, `scan`
    queues         `queue`: messages and consumers
    series         `series`: samples, PromQL
    vectors        `vector`: upsert and search

The store as a whole:

    status         `status`, `top`: a page about a store, once or live
    console        `console`: the pages in a browser
    jobs           `jobs`: background work
    chunks         `chunks`, `reattach`: immutable files, and the archive that they go to
    keys           `keys`: master keys of encrypted tables
    maintenance    `check`, `backup`, `restore`, `salvage`, `resume`, `repair`, `recover`, `metrics`
    disk_campaign  `check --campaign`: whether a disk keeps what it acknowledged
    bench          `bench`: how fast a disk and a machine are

Serving:

    serving        `serve`, `http`, `certificates`, `token`
    http_process   the HTTP process beside an owner
    cluster        `cluster`: set up a cluster, run a member, replace one
    certificates   keys and certificates for a server and for members

What is printed:

    output         tables, lines with tabs, JSON
    formatting     values as text and as JSON, and back
    plot           samples as a plot of characters
    logs           the log, on stderr
"""

from __future__ import annotations

import errno
import os
import signal
import sys

# Exit codes: 0 done; 1 something is damaged or was declined; 2 the call is wrong; and by what to do next:
NOT_FOUND = 3
TRY_LATER = 4
REOPEN = 5
RESTORE = 6
INTERRUPTED = 130


def main() -> None:
    """Run the command; a Penstock error prints one line."""
    _open_closed_streams()
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not behind nohup
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt during the imports just ends this process
    from penstock.cli.program import run
    from penstock.errors import PenstockError

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
        sys.stdout.flush()
    except PenstockError as error:
        _print_traceback()
        print(f"penstock: {error}", file=sys.stderr)
        code = exit_code(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output, like `head`, closed it
        _drop_output()
        code = 0
    except OSError as error:  # of a file that the command was given, or of its output; a store's own are translated
        _print_traceback()
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"penstock: {where}{error.strerror or error}", file=sys.stderr)
        _drop_output()
        code = os_exit_code(error)
    sys.exit(code)


def _print_traceback() -> None:
    """Print where the current error comes from, with --debug."""
    if "--debug" in sys.argv:
        import traceback  # here: until `main` runs, an interrupt prints one of Python's own

        traceback.print_exc()


def _open_closed_streams() -> None:
    """Give closed standard streams to /dev/null: the next file to be opened would get the number of one of them."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as the process runs
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        stream.reconfigure(encoding="utf-8", errors=errors)  # type: ignore[union-attr]  # in any locale: data are UTF-8


def _drop_output() -> None:
    """Discard what is left to flush: it would fail once more, at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def os_exit_code(error: OSError) -> int:
    """Return the exit code of an error of the operating system: that of a full disk, or of a wrong call."""
    return TRY_LATER if error.errno in (errno.ENOSPC, errno.EDQUOT) else 2


def exit_code(error: Exception) -> int:
    """Return the exit code of an error: what a script may do about it."""
    from penstock.errors import FixTheCall, NotFound, PartitionPaused, Reopen, Restore, RetryLater

    codes = ((NotFound, NOT_FOUND), (FixTheCall, 2), (RetryLater, TRY_LATER), (Restore, RESTORE))
    for kind, code in codes:
        if isinstance(error, kind):
            return code
    return REOPEN if isinstance(error, (Reopen, PartitionPaused)) else 1
