"""What the change feed of a queue must say: each commit leads from the messages before it to those after it."""

from __future__ import annotations

from typing import Any

from penstock.kinds.change_reading import BOUNDS
from penstock.queue.view import QueueView

Rows = list[dict[int, bytes]]  # by shard: payloads by sequence
Change = tuple[int, str, int, int, bytes | None]  # LSN, type, shard, sequence, payload


def queue_changes(table: QueueView, after: int | None = None) -> list[Change]:
    columns = table.changes(after=after).to_arrow()
    assert columns["shard"].to_pylist() == columns["_shard"].to_pylist()
    names = ("_commit_version", "_change_type", "shard", "sequence", "payload")
    return list(zip(*(columns[name].to_pylist() for name in names), strict=True))


def floors(table: QueueView) -> list[int]:
    """For each shard: the LSN up to which its feed was trimmed."""
    (bounds,) = table._reading.query(table._info, BOUNDS, b"")
    lsns: list[int] = bounds.column("floor").to_pylist()
    return lsns


def follow_queue(rows: Rows, changes: list[Change], *, preimages: bool) -> Rows:
    """The messages after the changes; an error if one of them is not a change of those before it."""
    rows, last, following = [dict(shard) for shard in rows], 0, [1 + max(shard, default=0) for shard in rows]
    for lsn, kind, shard, sequence, payload in changes:
        assert lsn >= last, "the feed is in LSN order"
        last = lsn
        if kind == "insert":
            assert sequence >= following[shard], f"message {sequence} was there before it was inserted"
            following[shard] = sequence + 1
            assert payload is not None
            rows[shard][sequence] = payload
        else:
            assert kind == "delete"
            assert sequence == min(rows[shard]), f"message {sequence} is not the oldest, and was deleted"
            assert payload == (rows[shard][sequence] if preimages else None)
            del rows[shard][sequence]
    return rows


def above_floors(changes: list[Change], floors: list[int]) -> list[Change]:
    """The changes above the floor of their shard."""
    return [change for change in changes if change[0] > floors[change[2]]]


def check_feed(table: Any, live: Rows, earlier: list[Change], *, preimages: bool) -> list[Change]:
    """Compare a feed with the messages, and with what an earlier reader has seen of it; return it."""
    changes, left = queue_changes(table), floors(table)
    if not any(left):
        assert follow_queue([{} for _ in live], changes, preimages=preimages) == live
    else:  # some of it was trimmed: what is left must tell of every message since
        inserted = {(shard, sequence): payload for _, kind, shard, sequence, payload in changes if kind == "insert"}
        deleted = {(shard, sequence) for _, kind, shard, sequence, _ in changes if kind == "delete"}
        for shard, rows in enumerate(live):
            assert not deleted & {(shard, sequence) for sequence in rows}
            since = [payload for (of, sequence), payload in inserted.items() if of == shard and sequence in rows]
            newest = [rows[sequence] for sequence in sorted(rows)]
            assert newest[len(newest) - len(since) :] == since
    before = above_floors(earlier, left)
    assert changes[: len(before)] == before, f"a reader has seen {before}, and it is {changes} now"
    return changes
