"""`penstock get|put|delete|scan`: rows of kv tables.

Keys are given as text, or as 0x and hexadecimal digits. Values are those of the table's type: bytes and text as they
are, anything else as JSON.

Thread: one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.formatting import format_value, parse_bytes, parse_text, parse_value
from penstock.cli.output import first_of
from penstock.cli.session import Limit, Name, Session, command
from penstock.errors import NotFound
from penstock.lsm.rows import VALUE_BYTES_MAX

KEY_LETTERS = 100  # of a key in an error
Key = Annotated[str, typer.Argument(help="a key: text, or 0x and hexadecimal digits")]


def _table(session: Session, name: str) -> Any:
    return session.store.kv(name, create=False)


def _key(table: Any, text: str) -> Any:
    return parse_text(text) if table.schema.field("key").type == "string" else parse_bytes(text)


def _short_key(key: Any) -> str:
    text = format_value(key)
    return text if len(text) <= KEY_LETTERS else f"{text[:KEY_LETTERS]}…"


@command(app)
def get(session: Session, table: Name, key: Key) -> None:
    """Print the value of a key; byte for byte where the output is not a terminal."""
    kv = _table(session, table)
    row_key = _key(kv, key)
    value = kv.get(row_key)
    if value is None and row_key not in kv:
        raise NotFound(f"there is no key {_short_key(row_key)} in {table}")
    session.out.value(value)


@command(app, numbers=True)
def put(
    session: Session,
    table: Name,
    key: Key,
    value: Annotated[str, typer.Argument(help="the value; - reads it from stdin, byte for byte")],
) -> None:
    """Set a key of a kv table, durably."""
    kv = _table(session, table)
    kind, declared = kv.schema.field("value").type, kv.value_type
    if value == "-":
        data = sys.stdin.buffer.read(VALUE_BYTES_MAX + 1)  # one more is refused, also of an input that never ends
    else:
        data = parse_bytes(value) if declared == "bytes" else os.fsencode(value)
    row_key = _key(kv, key)
    kv.put(row_key, parse_value(data, kind, declared), durable=True)
    session.out.done("written, and durable", table=table, key=row_key)


@command(app)
def delete(session: Session, table: Name, key: Key) -> None:
    """Remove a key of a kv table, durably."""
    kv = _table(session, table)
    row_key = _key(kv, key)
    kv.delete(row_key, durable=True)
    session.out.done("deleted, and durable", table=table, key=row_key)


@command(app)
def scan(  # noqa: PLR0917 - typer reads the signature
    session: Session,
    table: Name,
    prefix: Annotated[str, typer.Option(help="of the keys")] = "",
    start: Annotated[str, typer.Option(help="the first key")] = "",
    end: Annotated[str | None, typer.Option(help="the first key that is not printed any more")] = None,
    reverse: bool = False,
    limit: Limit = None,
) -> None:
    """Print rows of a kv table in the order of their keys."""
    kv = _table(session, table)
    rows_max = session.out.limit(limit)
    rows: Iterator[Any] = kv.scan(
        _key(kv, start),
        None if end is None else _key(kv, end),
        prefix=_key(kv, prefix),
        reverse=reverse,
        limit=None if rows_max is None else rows_max + 1,
    )
    session.out.rows(("key", "value"), first_of(rows), limit=rows_max)
