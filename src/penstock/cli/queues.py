"""`penstock queue …`: messages of queues, and their consumers.

Thread: one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BufferedReader
from typing import Annotated, Any, cast

import typer

from penstock.cli.app import app, group
from penstock.cli.formatting import format_value, parse_bytes, parse_time
from penstock.cli.output import first_of, note
from penstock.cli.session import Limit, Name, Session, command
from penstock.errors import Invalid
from penstock.host.waiting import pause
from penstock.lsm.rows import VALUE_BYTES_MAX
from penstock.queue.table import DIGITS_MAX

queue_group = group("queue", "Messages of a queue, and its consumers.")

PAGE = 1_000  # messages that are read at once
FOLLOW_S = 0.5  # between two polls for new messages
COLUMNS = ("shard", "sequence", "time", "key", "payload")


def _queue(session: Session, name: str) -> Any:
    return session.store.queue(name, create=False)


@command(queue_group, "put")
def put_message(
    session: Session,
    queue: Name,
    payload: Annotated[str, typer.Argument(help="of the message; - sends each line of stdin")],
    key: Annotated[str | None, typer.Option(help="messages of one key keep their order")] = None,
) -> None:
    """Append a message to a queue, durably; print its position."""
    table, key_bytes = _queue(session, queue), None if key is None else parse_bytes(key)
    if payload == "-":
        sent = 0
        with session.out.progress("sending", left=lambda: f"{sent:,} messages are durable, the next ones may be"):
            for lines in _line_batches():
                table.put_many(lines, keys=None if key_bytes is None else [key_bytes] * len(lines), durable=True)
                sent += len(lines)
        session.out.done(f"{sent:,} messages, durable", queue=queue, messages=sent)
        return
    where = table.append(parse_bytes(payload), key=key_bytes)
    session.out.done(
        f"shard {where.shard}, sequence {where.sequence}, LSN {where.lsn}",
        shard=where.shard, sequence=where.sequence, lsn=where.lsn,
    )  # fmt: skip


def _line_batches() -> Iterator[list[bytes]]:
    """Yield the lines of stdin as they come; `Invalid` for one that is too long, also if it never ends."""
    stdin, rest = cast(BufferedReader, sys.stdin.buffer), b""
    while data := stdin.read1(1 << 20):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > VALUE_BYTES_MAX:
            raise Invalid(f"a line of stdin has more than {VALUE_BYTES_MAX:,} bytes, which no message may have")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _messages(table: Any, start: dict[int, int]) -> Iterator[Any]:
    """Yield the messages from these sequences on, shard by shard; `start` moves with them."""
    for shard in sorted(start):
        while page := table.read(shard, start[shard], PAGE):
            for message in page:
                start[shard] = message.sequence + 1
                yield message


def _row(message: Any) -> tuple[Any, ...]:
    moment = datetime.fromtimestamp(message.time_us / 1e6, UTC)
    return message.shard, message.sequence, moment, message.key, message.payload


@command(queue_group)
def tail(
    session: Session,
    queue: Name,
    start: Annotated[
        str | None,
        typer.Option(help="earliest, latest, consumer:NAME, time:MICROSECONDS, a sequence; default: the last"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with new messages until Ctrl-C")] = False,
    limit: Limit = None,
) -> None:
    """Print the last messages of a queue, and with --follow those that come."""
    table, rows_max = _queue(session, queue), session.out.limit(limit)
    if start is None:
        last = 20 if rows_max is None else rows_max
        positions = {shard: max(bounds.first, bounds.next - last) for shard, bounds in enumerate(table.bounds())}
    else:
        positions = table.offsets(start)
    rows = map(_row, _messages(table, positions))
    session.out.rows(
        COLUMNS,
        first_of(rows),
        limit=None if start is None or follow else rows_max,  # whether there is one more row is seen by taking it
        none="" if follow else "there are none",
    )
    while follow:
        pause(FOLLOW_S)
        session.out.rows(COLUMNS, map(_row, _messages(table, positions)), none="")
        sys.stdout.flush()


@command(queue_group)
def dump(
    session: Session,
    queue: Name,
    start: Annotated[str, typer.Option(help="earliest, consumer:NAME, time:MICROSECONDS or a sequence")] = "earliest",
) -> None:
    """Print all payloads, a line each; a payload with a line break needs --json, which prints whole messages."""
    table = _queue(session, queue)
    messages = _messages(table, table.offsets(start))
    if session.out.json:
        session.out.rows(COLUMNS, map(_row, messages), none="")
        return
    for message in messages:
        if b"\n" in message.payload:
            raise Invalid(f"message {message.sequence} of shard {message.shard} has a line break: use --json")
        sys.stdout.buffer.write(message.payload + b"\n")


_TOTALS = ("batches", "rows_in", "rows_out", "dead", "duplicates")  # of streams
_CONSUMER = ("consumer", "mode", "lag", "leased", "positions", "seen", *_TOTALS)


@command(queue_group)
def consumers(session: Session, queue: Name) -> None:
    """List the consumers of a queue: their lag, positions, when they were seen, and what their streams did."""
    session.out.rows(_CONSUMER, map(_consumer, _queue(session, queue).consumers()))


def _consumer(consumer: Any) -> tuple[Any, ...]:
    last_seen = None if consumer.last_seen_us is None else datetime.fromtimestamp(consumer.last_seen_us / 1e6, UTC)
    positions = {str(shard): at for shard, at in consumer.position.items()}
    totals = [None if consumer.stream is None else getattr(consumer.stream, name) for name in _TOTALS]
    return consumer.name, consumer.mode, consumer.lag, consumer.leased, positions, last_seen, *totals


@command(app, "consumers")
def all_consumers(session: Session) -> None:
    """List the consumers of all queues."""
    store = session.store
    queues = [info.name for info in store.port.tables() if info.kind == "queue"]
    rows = ((name, *_consumer(consumer)) for name in queues for consumer in store.queue(name, create=False).consumers())
    session.out.rows(("queue", *_CONSUMER), rows)


@command(queue_group)
def seek(
    session: Session,
    queue: Name,
    consumer: Annotated[str, typer.Argument(help="its name")],
    to: Annotated[str, typer.Argument(help="earliest, latest, a sequence, or a time such as 2026-03-01T12:00:00Z")],
) -> None:
    """Move a consumer; it reads on from there."""
    table = _queue(session, queue)
    if to.isdecimal() and len(to) <= DIGITS_MAX:
        where: Any = int(to)
    elif to in ("earliest", "latest"):
        where = to
    else:
        moment = parse_time(to)
        where = {shard: table.seek(moment, shard=shard) for shard in range(table.shards)}
    names = {info.name for info in table.consumers()}
    table.consumer(consumer).seek(where)
    if consumer not in names:
        others = ", ".join(map(format_value, sorted(names)))
        note(f"{format_value(consumer)} is new; the consumers of {queue} were {others or 'none'}")
    session.out.done(
        f"{format_value(consumer)} reads on from {to}", consumer=consumer, position=table.consumer(consumer).position
    )
