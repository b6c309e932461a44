"""What a command prints: tables for people, lines with tabs for other programs, JSON with --json.

Thread: one.
Invariants: (1) data are never read as markup, wrapped, or shortened. (2) Where rows are left out, stderr says so.
(3) With --json, stdout is one JSON object a line and nothing else. (4) Rows are printed as they come, in bounded
memory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import msgspec

from penstock.cli.formatting import format_value, json_value, raw_bytes

PAGE_ROWS = 500  # rows that are aligned together
BY_THE_OWNER = "the process that owns the store may still finish it"
TERMINAL_ROWS = 20  # that a terminal gets by default
_COLOR = re.compile(r"(\x1b\[[\d;]*m)")


class Output:
    """Prints the result of one command."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.terminal = sys.stdout.isatty()
        self.draws = self.terminal and os.environ.get("TERM") != "dumb"  # it understands more than lines of text
        self.color = self.draws and not os.environ.get("NO_COLOR")

    def limit(self, requested: int | None) -> int | None:
        """Return how many rows to print: as requested (0: all); by default 20 at a terminal, and all for a program."""
        if requested is None:
            return TERMINAL_ROWS if self.terminal and not self.json else None
        return requested or None

    def rows(
        self,
        columns: tuple[str, ...],
        rows: Iterable[Iterable[Any]],
        *,
        limit: int | None = None,
        none: str = "there are none",
    ) -> int:
        """Print rows, at most `limit` of them; return their number. `none` is for a terminal, if there are no rows."""
        source, count = iter(rows), 0
        head = source if limit is None else islice(source, limit)
        if self.json:
            for row in head:
                self.document(dict(zip(columns, row, strict=True)))
                count += 1
        elif self.terminal:
            count = self._aligned(columns, head)
            if not count and none:
                note(none)
        else:
            for row in head:
                print("\t".join(map(format_value, row)))
                count += 1
        if limit is not None and count == limit and next(source, None) is not None:
            note(f"only the first {limit:,} rows: --limit 0 prints all")
        return count

    def _aligned(self, columns: tuple[str, ...], rows: Iterator[Iterable[Any]]) -> int:
        count, heading = 0, True
        while page := [tuple(map(format_value, row)) for row in islice(rows, PAGE_ROWS)]:
            widths = [max(map(len, cells)) for cells in zip(columns, *page, strict=True)]
            if heading:
                head = _line(columns, widths)
                print(f"\x1b[1m{head}\x1b[0m" if self.color else head)
                heading = False
            for row in page:
                print(_line(row, widths))
            count += len(page)
        return count

    def document(self, fields: dict[str, Any]) -> None:
        """Print one object: a JSON line, or a line for each field."""
        if self.json:
            print(msgspec.json.encode({name: json_value(value) for name, value in fields.items()}).decode())
            return
        width = max(map(len, fields), default=0)
        for name, value in fields.items():
            print(f"{name:{width}}  {format_value(value)}")

    def value(self, value: Any) -> None:
        """Print one value: as it is, byte for byte, unless stdout is a terminal."""
        if self.json:
            self.document({"value": value})
        elif self.terminal:
            print(format_value(value))
        else:
            sys.stdout.buffer.write(raw_bytes(value))

    def done(self, text: str, **fields: Any) -> None:
        """Say what was done: a sentence for people, the fields with --json."""
        if self.json:
            self.document(fields)
        else:
            print(text)

    @contextmanager
    def progress(
        self, title: str, *, left: str | Callable[[], str] = BY_THE_OWNER
    ) -> Iterator[Callable[[Any], None] | None]:
        """Yield a callable for `progress=`, which draws a bar on stderr; None if stderr is not a terminal.

        After Ctrl-C one line says what was `left`; a callable finds out at that moment.
        """
        try:
            with self._bar(title) as bar:
                yield bar
        except KeyboardInterrupt:
            note(f"interrupted: {left if isinstance(left, str) else left()}")
            raise

    @contextmanager
    def _bar(self, title: str) -> Iterator[Callable[[Any], None] | None]:
        if not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda now: bar.update(task, completed=now.bytes, total=now.bytes_total)


def _line(cells: Iterable[str], widths: list[int]) -> str:
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def note(text: str) -> None:
    """Tell a person something beside the result: on stderr."""
    print(f"penstock: {text}", file=sys.stderr)


def screen(lines: list[str]) -> str:
    """Return what draws a live page over the last one, without flicker: each line is replaced, none is wrapped.

    What does not fit is left out, and the page says so: `…` at the end of a line, and their number below.
    """
    columns, rows = shutil.get_terminal_size()
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"… {len(lines) - rows + 1} lines more: `penstock status` prints all"]
    return "\x1b[H" + "\n".join(cut(line, columns) + "\x1b[K" for line in lines) + "\x1b[J"


def cut(line: str, columns: int) -> str:
    """Return a line cut to `columns`; its colours stay, and take no room."""
    from rich.cells import cell_len

    parts = _COLOR.split(line)  # text and colours in turn
    if sum(map(cell_len, parts[::2])) <= columns:
        return line
    room, text = columns - 1, ""
    for number, part in enumerate(parts):
        if number % 2:
            text += part
            continue
        for letter in part:
            room -= cell_len(letter)
            if room < 0:
                return text + "…\x1b[0m"
            text += letter
    return text


def pages(read: Callable[[int], list[Any]], start: int, next_of: Callable[[Any], int]) -> Iterator[Any]:
    """Yield what `read` returns from `start` on, page by page, until a page is empty."""
    while page := read(start):
        yield from page
        start = next_of(page[-1])


def first_of(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, of which the first is computed at once: its error comes before anything is printed."""
    rest = iter(items)
    head = list(islice(rest, 1))
    return chain(head, rest)
