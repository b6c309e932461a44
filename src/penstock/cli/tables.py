"""`penstock table …`: what tables there are; create, describe, compact and drop them.

Thread: one.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.app import app, group
from penstock.cli.formatting import format_bytes
from penstock.cli.session import Name, Session, Yes, command
from penstock.errors import Invalid
from penstock.kinds import numbers_of, statistics_of
from penstock.partition.storage_options import codecs_of

table_group = group("table", "Tables of a store.")


class Compression(Enum):
    """The codecs that `table create` takes."""

    none = "none"
    lz4 = "lz4"
    zstd = "zstd"


class TableKind(Enum):
    """The kinds that `table create` makes."""

    kv = "kv"
    queue = "queue"
    series = "series"
    vector = "vector"


@command(table_group, "list")
def list_tables(session: Session) -> None:
    """List the tables."""
    infos = session.store.port.tables()
    session.out.rows(("table", "kind", "shards"), ((info.name, info.kind, info.shards) for info in infos))


@command(table_group)
def create(  # noqa: PLR0917 - typer reads the signature
    session: Session,
    name: Name,
    kind: Annotated[TableKind, typer.Argument(help="of the table")],
    shards: Annotated[int, typer.Option(help="how many parts it has; fixed")] = 1,
    value: Annotated[str | None, typer.Option(help="kv: bytes, utf8, json, int64 or float64")] = None,
    key: Annotated[str | None, typer.Option(help="kv: bytes or utf8")] = None,
    dimensions: Annotated[int | None, typer.Option(help="vector: of each vector")] = None,
    metric: Annotated[str | None, typer.Option(help="vector: cosine, dot or euclidean")] = None,
    headers: Annotated[bool, typer.Option("--headers", help="queue: messages may have headers")] = False,
    changes: Annotated[bool, typer.Option("--changes", help="with a change feed")] = False,
    encrypted: Annotated[bool | None, typer.Option(help="by default as the owner's settings say")] = None,
    compression: Annotated[Compression, typer.Option(help="of its files")] = Compression.none,
    compression_level: Annotated[int, typer.Option(help="of zstd, from 1 to 22; 0: its default")] = 0,
) -> None:
    """Create a table; the store, too, if the folder is absent or empty."""
    options: dict[str, Any] = {
        "value": value, "key": key, "dimensions": dimensions, "metric": metric,
        "headers": headers or None, "changes": changes or None,
    }  # fmt: skip
    options = {option: setting for option, setting in options.items() if setting is not None}
    allowed = {
        TableKind.kv: {"value", "key", "changes"},
        TableKind.queue: {"headers", "changes"},
        TableKind.series: {"changes"},
        TableKind.vector: {"dimensions", "metric", "changes"},
    }[kind]
    for option in options:
        if option not in allowed:
            raise Invalid(f"--{option} is not for a {kind.value} table: leave it out")
    if kind is TableKind.vector and dimensions is None:
        raise Invalid("a vector table needs --dimensions: the length of its vectors")
    session.create = True
    if name in session.store.tables():
        raise Invalid(f"there is already a table {name}: give another name")
    options["encrypted"] = encrypted
    if compression is not Compression.none or compression_level:
        config = penstock.CompressionConfig(penstock.Codec[compression.value.upper()], compression_level)
        options["storage"] = penstock.StorageOptions(compression=config)
    getattr(session.store, kind.value)(name, shards=shards, **options)
    session.out.done(f"created {kind.value} table {name}", table=name, kind=kind.value, shards=shards)


@command(table_group)
def describe(session: Session, name: Name) -> None:
    """Print what is known about a table: its columns, its size, how far it is."""
    store = session.store
    table = store.table(name)
    info = next(entry for entry in store.port.tables() if entry.name == name)
    fields: dict[str, Any] = {"table": info.name, "kind": info.kind, "shards": info.shards, "id": info.table_id}
    codecs = [f"{codec}:{level}" if level else codec for codec, level in codecs_of(info.storage_options)]
    fields |= {"encrypted": info.key is not None, "compression": ",".join(codecs)}
    fields |= {f"column {field.name}": str(field.type) for field in table.schema}
    statistics: Any = statistics_of(table)  # of its kind
    if info.kind == TableKind.vector.value:
        fields |= {"dimensions": table.dimensions, "metric": table.metric}
    if info.kind == TableKind.queue.value:  # its statistics have an entry for each consumer and shard
        fields |= {
            "messages": statistics.messages,
            "consumers": len({consumer.consumer for consumer in statistics.consumers}),
        }
    for member, value in numbers_of(statistics).items():
        fields.setdefault(member, value if isinstance(value, (int, float, str, bool)) or value is None else len(value))
    for partition in store.statistics().partitions:
        if partition.table == name:
            fields[f"shard {partition.shard}"] = (
                f"{partition.state}, applied to LSN {partition.applied}, stored to {partition.stored}"
            )
    session.out.document(fields)


@command(table_group)
def compact(
    session: Session, name: Name, wait_s: Annotated[float, typer.Option(help="for other work on the table")] = 60.0
) -> None:
    """Merge a table into as few files as possible."""
    with session.out.progress("compacting"):
        report = session.store.compact(name, timeout_s=wait_s)
    fields = {field: getattr(report, field) for field in report.__dataclass_fields__}
    session.out.document({"table": name, **fields})


@command(table_group)
def drop(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete a table and its contents."""
    table = session.store.table(name)
    statistics = statistics_of(table)
    content = ""
    if statistics is not None:
        content = f" with about {statistics.size.rows:,} rows, {format_bytes(statistics.size.file_bytes)}"
    session.confirm(f"Delete {name}{content}?", yes=yes)
    session.store.drop(name)
    session.out.done(f"dropped {name}", table=name)


@command(app)
def init(session: Session) -> None:
    """Create an empty store in a folder that is absent or empty."""
    folder = session.folder
    existed = (folder / "STORE").exists()
    session.create = True
    tables = session.store.tables()
    if existed:
        raise Invalid(f"there is already a store in {folder}, with {len(tables)} tables: give another folder")
    session.out.done(f"made a store in {folder}", store=str(folder))
