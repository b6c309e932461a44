"""Compare and set: a group that is written only if some rows have the LSNs that its writer has read.

The owner, the only process that writes the journal, judges such a group at the group's own position in the order of
writes. With the dispatcher's turn (so that nothing is applied):

    1. no write that is not applied yet may touch the rows; if one does, wait until it is applied, and begin again
    2. the rows must have the expected LSNs, else the group is refused, and never written
    3. under the coordinator's lock: look again for writes that came since 1, and append the group

So the rows are as expected at the group's position in the journal, and the record needs no condition: replicas and
replays apply it as they apply any other. A token is looked up first: a group that was committed before is a duplicate,
whatever became of its rows. Like every conditional group, it is visible when it is applied.

Thread: any.
Invariants: (1) no write to the rows comes between the judgement and the group. (2) a refused group was not written,
and never will be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.coordinator import Epoch
from penstock.errors import Backpressure, Closed, OutcomeUnknown, Poisoned, WaitExpired
from penstock.host.clock import Clock
from penstock.host.waiting import Retries
from penstock.journal.partitions import PartitionId
from penstock.kinds import ExpectedRow, Machine, RowConditional
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger_records import TableInfo, Verdict
from penstock.partition.partition import Partition
from penstock.partition.pending import PendingDelta, PendingGroup, parts
from penstock.partition.reference import Reference
from penstock.store.flusher import Coordinator

JUDGE_S = 30.0  # how long a group may wait for other writes to its rows
ROOM_S, ROOM_S_MAX = 0.001, 0.05  # between two attempts to find room
SEARCHED_MAX = 256  # entries of a shard that are searched for its rows; behind more of them it waits

KeysOfShards = Mapping[PartitionId, tuple[Machine, frozenset[bytes]]]
Expectation = tuple[RowConditional, TableInfo, ExpectedRow]


class _Touched(Exception):
    """A write to the rows came after they were judged."""


def submit_if(
    group: PendingGroup,
    size: int,
    expectations: Sequence[Expectation],
    token: tuple[str, int] | None,
    *,
    coordinator: Coordinator,
    dispatcher: Dispatcher,
    machine_of: Callable[[PartitionId], Machine],
    clock: Clock,
) -> Epoch:
    """Append a group if its rows are as expected, else raise the error of the first that is not."""
    deadline_s, group.judged = clock.monotonic_s() + JUDGE_S, True
    retries = Retries(clock, deadline_s, pause_s=ROOM_S, pause_s_max=ROOM_S_MAX)
    while True:
        unused = _is_unused(dispatcher, token)
        # This may wait for late shards, which is forbidden with the turn.
        rows = _by_shard(expectations if unused else (), machine_of)
        for machine, keys in rows.values():  # it fetches evicted files: with the turn, every table would wait for them
            for key in keys:
                machine.get(key)
        try:
            with dispatcher.turn:
                dispatcher.finish()
                if unused and not _is_unused(dispatcher, token):
                    unused, rows = False, {}
                are_late = _are_late(dispatcher, rows)
                if are_late and clock.monotonic_s() >= deadline_s:
                    raise _too_late()
                if not are_late and not _touches(coordinator, rows):
                    if unused:
                        _judge(expectations, rows)
                    return coordinator.write_into(_add_untouched, size, group, coordinator, rows, 0.0)
        except _Touched:
            pass
        except Backpressure:
            if not retries.again():  # a pause: memory may be short, and nothing left to be applied
                raise
        _wait_for_others(coordinator, deadline_s - clock.monotonic_s())


def _is_unused(dispatcher: Dispatcher, token: tuple[str, int] | None) -> bool:
    return token is None or dispatcher.ledger.token_verdict(*token) is Verdict.ACCEPTED


def _are_late(dispatcher: Dispatcher, rows: KeysOfShards) -> bool:
    """Whether a write to one of the rows may be dispatched and not applied. Requires: the dispatcher's turn."""
    return any(_is_late(dispatcher.find_open(number), *one) for number, one in rows.items())


def _is_late(shard: Partition | None, machine: Machine, keys: frozenset[bytes]) -> bool:
    """Whether an entry that waits in a shard may touch one of the keys. Others may wait: they do not change them."""
    if shard is None or shard.failures or shard.deferred_from is not None or len(shard.backlog) > SEARCHED_MAX:
        return shard is None or shard.late
    return any(
        entry.decoded is None
        or any(isinstance(part, Reference) or machine.touches_any(part, keys) for part in entry.decoded)
        for entry in shard.backlog
    )


def _by_shard(expectations: Sequence[Expectation], machine_of: Callable[[PartitionId], Machine]) -> KeysOfShards:
    keys: dict[PartitionId, set[bytes]] = {}
    for _, _, row in expectations:
        keys.setdefault(row.partition, set()).add(row.key)
    return {partition: (machine_of(partition), frozenset(some)) for partition, some in keys.items()}


def is_touched(coordinator: Coordinator, partition: PartitionId, machine: Machine, key: bytes) -> bool:
    """Whether a write to a row is not applied yet."""
    return _touches(coordinator, {partition: (machine, frozenset((key,)))})


def _touches(coordinator: Coordinator, rows: KeysOfShards) -> bool:
    """Whether a write that is not applied yet touches one of the rows."""
    layers = coordinator.layers
    for delta in (layers.pending, *layers.deltas):
        for group in delta.groups:
            for partition, (machine, keys) in rows.items():
                for part in parts(group.sections.get(partition, ())):
                    if isinstance(part, Reference) or machine.touches_any(part, keys):
                        return True
    return False


def _judge(expectations: Sequence[Expectation], rows: KeysOfShards) -> None:
    """Raise the error of the first row that is not as expected. Requires: the dispatcher's turn."""
    for kind, info, expected in expectations:
        row = rows[expected.partition][0].row(expected.key)
        lsn = 0 if row is None else row[1]
        if lsn != expected.lsn:
            raise kind.condition_failed(info, expected, lsn)


def _add_untouched(delta: PendingDelta, group: PendingGroup, coordinator: Any, rows: KeysOfShards) -> None:
    """Append a group under the coordinator's lock, unless a write to its rows has come since they were judged."""
    if _touches(coordinator, rows):
        raise _Touched
    delta.add(group)


def _too_late() -> Backpressure:
    return Backpressure(
        f"other writes to these rows were not applied within {JUDGE_S:g} s, nothing was written: retry later"
    )


def _wait_for_others(coordinator: Coordinator, left_s: float) -> None:
    """Wait until all writes so far are applied, so that their rows can be judged."""
    try:
        coordinator.wait_applied(None, max(0.0, left_s))
    except WaitExpired:
        raise _too_late() from None
    except OutcomeUnknown as error:  # of the other writes: this one was never in the journal
        if isinstance(error.__cause__, Closed):
            raise Closed(str(error.__cause__)) from error
        raise Poisoned(f"writes are refused after a failure ({error}): call recover()") from error
