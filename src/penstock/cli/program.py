"""Puts the program together and runs it: importing a module of commands registers them.

Thread: one.
"""

from __future__ import annotations

import sys

import typer
from typer.exceptions import TyperException

from penstock.cli import (  # noqa: F401 - for their commands
    bench,
    chunks,
    cluster,
    configuration,
    console,
    jobs,
    keys,
    kv,
    maintenance,
    queues,
    series,
    serving,
    status,
    tables,
    vectors,
)
from penstock.cli.app import app
from penstock.errors import Invalid

__all__ = ["app", "run"]


def run() -> int:
    """Run the command of this process; return its exit code. Wrong use is `Invalid`, in one line."""
    try:
        code = app(standalone_mode=False, prog_name="penstock")
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer ends so, with 1
            raise ended.__context__ from None
        raise
    except typer.Abort:  # the answer to a question was no, or there was none
        print("penstock: nothing was changed", file=sys.stderr)
        return 1
    except TyperException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        path = "penstock" if context is None else context.command_path
        raise Invalid(f"{error.format_message().rstrip('.')}: see {path} --help") from None
    return code if isinstance(code, int) else 0
