"""Runs a command of the program in this process, with the output as a pipe would get it."""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import dataclass

import msgspec

from penstock.cli import exit_code, os_exit_code
from penstock.cli.program import run
from penstock.errors import PenstockError


class Terminal(io.TextIOWrapper):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Ended:
    """What a command left."""

    code: int
    data: bytes
    err: str

    @property
    def out(self) -> str:
        return self.data.decode()

    @property
    def objects(self) -> list[dict[str, object]]:
        return [msgspec.json.decode(line) for line in self.data.splitlines()]


def penstock(*arguments: str, stdin: bytes = b"", terminal: bool = False) -> Ended:
    """Run `penstock ARGUMENTS`."""
    root = logging.getLogger()
    streams, argv, handlers, level = (sys.stdin, sys.stdout, sys.stderr), sys.argv, list(root.handlers), root.level
    out = (Terminal if terminal else io.TextIOWrapper)(io.BytesIO(), "utf-8", write_through=True)
    err = io.StringIO()
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(stdin), "utf-8"), out, err
    sys.argv = ["penstock", *arguments]
    try:
        try:
            code = run()
        except PenstockError as error:
            print(f"penstock: {error}", file=err)
            code = exit_code(error)
        except OSError as error:
            print(f"penstock: {error}", file=err)
            code = os_exit_code(error)
        out.flush()
        return Ended(code, out.buffer.getvalue(), err.getvalue())  # type: ignore[attr-defined]
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.argv = argv
        root.handlers[:] = handlers
        root.setLevel(level)
