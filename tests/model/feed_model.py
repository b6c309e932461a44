"""What the change feed of a kv table must say: each commit leads from the table before it to the table after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.feeds import maintain_feeds
from penstock.host.waiting import pause
from penstock.kinds import partitions_of
from penstock.store.store import Store

Rows = dict[bytes, Any]
Change = tuple[int, str, bytes, Any]  # LSN, type, key, value


def changes_of(store: Any, name: str, after: int | None = None) -> list[Change]:
    columns = store.kv(name, create=False).changes(after=after).to_arrow().to_pydict()
    return list(zip(columns["_commit_version"], columns["_change_type"], columns["key"], columns["value"], strict=True))


def follow(rows: Rows, changes: Iterable[Change], *, preimages: bool) -> Rows:
    """The table after the changes; an error if one of them is not a change of the table before it."""
    rows, last, written, before = dict(rows), 0, set[bytes](), None
    for lsn, kind, key, value in changes:
        assert lsn >= last, "the feed is in LSN order"
        written = written if lsn == last else set()
        last = lsn
        if before is not None:
            assert (kind, key) == ("update_postimage", before), "a preimage stands before its postimage"
        before = None
        if kind == "update_preimage":
            assert preimages
            assert rows[key] == value
            before = key
            continue
        assert key not in written, "a commit changes a key once"
        written.add(key)
        if kind == "insert":
            assert key not in rows, f"{key!r} was there before it was inserted"
        else:
            assert key in rows, f"{key!r} was not there: {kind}"
        if kind == "delete":
            assert value == (rows[key] if preimages else None)
            del rows[key]
        else:
            rows[key] = value
    assert before is None
    return rows


def await_applied(store: Store) -> None:
    """Wait until no shard is late: the maintenance of feeds leaves a late one out, until the next time."""
    port = store._port
    store.flush()  # a durable write may not have reached its shard yet
    for info in port.tables():
        for partition in partitions_of(info):
            port.machine(partition)  # it has applied all, and may count as late for a moment longer
            for _ in range(6_000):
                if port.machine_unless_late(partition) is not None:
                    break
                pause(0.01)
            else:
                raise AssertionError(f"{info.name} stays late")


def take_in_expired(store: Store) -> None:
    """Let every feed take in the rows that expired."""
    port = store._port
    await_applied(store)
    maintain_feeds(port.tables(), port.machine_unless_late, port.submit, port.time_us)
    store.flush()
