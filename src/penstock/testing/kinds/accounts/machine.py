"""A shard of accounts: an LSM tree with a row for each booking.

    account, 0, LSN (8 bytes), index in the record (4 bytes)   ->   amount i64

The key depends on the record alone, so a replay and a replica write the same rows, and a booking replaces nothing.

Thread: see `partition.machine`; reading from any.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import Closed
from penstock.kinds import ALL_LATER, ShardSnapshot, TreeMachine
from penstock.lsm.memtable import Edit, Memtable
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.view import View
from penstock.partition.machine import Entry, readable
from penstock.testing.kinds.accounts import section

AMOUNT = struct.Struct("<q")
_BOOKED = struct.Struct(">BQI")  # what follows the account in a key: 0, LSN, index


def account_of(key: bytes) -> bytes:
    """Return the account of a row."""
    return key[: -_BOOKED.size]


def lsn_of(key: bytes) -> int:
    """Return the LSN of a row's record."""
    return _BOOKED.unpack(key[-_BOOKED.size :])[1]  # type: ignore[no-any-return]


def _rows(sections: Sequence[section.Bookings], lsn: int) -> dict[bytes, bytes]:
    bookings = [booking for part in sections for booking in part]
    return {
        account + _BOOKED.pack(0, lsn, index): AMOUNT.pack(amount) for index, (account, amount) in enumerate(bookings)
    }


class AccountsSnapshot(ShardSnapshot):
    """A shard at one LSN."""

    def __init__(self, snapshot: Snapshot, view: View | None = None) -> None:
        self.snapshot = snapshot
        self._view = snapshot if view is None else view  # `view` includes bookings that are not applied yet

    def rows(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Return keys and amounts of the rows in a range."""
        if self.snapshot.is_closed:
            raise Closed("the snapshot was closed: take another")
        return self._view.scan(start, end)

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self._view.scan_arrow(start, end)

    def close(self) -> None:
        self.snapshot.close()


class AccountsMachine(TreeMachine):
    """The state machine of a shard."""

    def apply(self, entry: Entry) -> None:
        sections = entry.decoded or [readable(section.decode, part.payload) for part in entry.sections]
        self.tree.apply(Edit(lsn=entry.lsn, time_us=entry.time_us, puts=_rows(sections, entry.lsn)))

    def snapshot(self) -> AccountsSnapshot:
        return AccountsSnapshot(self.tree.snapshot())

    def overlay(self, state: AccountsSnapshot, sections: Sequence[section.Bookings], time_us: int) -> AccountsSnapshot:
        later = Memtable()
        later.apply(Edit(lsn=ALL_LATER, time_us=time_us, puts=_rows(sections, ALL_LATER)))
        return AccountsSnapshot(state.snapshot, state.snapshot.under(later))
