"""Leases on messages, in the owner's memory: which consumer holds which message, and until when.

For each consumer and shard there is a window over the messages above the floor, as columns: until when a message is
leased, under which lease, and how often it was delivered.

Thread: the caller's lock.
Invariants: (1) a message whose lease has not expired is not claimed again. (2) a claim stays within the window that the
ledger can record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from penstock.queue.positions import DELIVERIES_MAX, WINDOW, Ack, ConsumerRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

# One counter for all queues of a process: a message of another queue, or of a dropped queue of the same name, is never
# confused with a message of this queue that has the same sequence.
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Claim:
    """Messages of a shard under one lease."""

    shard: int
    first: int  # the oldest message of the shard at that time
    sequences: NDArray[np.int64]  # ascending
    deliveries: NDArray[np.uint8]  # of each message, including this one
    lease: int


class _Window:
    """The messages [floor, floor + WINDOW) of a shard, as one consumer sees them."""

    def __init__(self, row: ConsumerRow) -> None:
        self.floor = row.floor
        self.until_s = np.zeros(WINDOW)
        self.lease = np.zeros(WINDOW, np.int64)
        self.counts = row.counts()

    def move(self, row: ConsumerRow) -> None:
        """Move the window with the floor; a step back (a seek) resets it."""
        step = row.floor - self.floor
        if step < 0 or step >= WINDOW:
            self.__init__(row)  # type: ignore[misc]
        elif step:
            for column in (self.until_s, self.lease, self.counts):
                column[:-step] = column[step:]
                column[-step:] = 0
            self.floor = row.floor

    def indexes(self, sequences: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the columns' indexes of messages; None if one is outside the window."""
        indexes = np.asarray(sequences, np.int64) - self.floor
        return None if (indexes < 0).any() or (indexes >= WINDOW).any() else indexes


class Leases:
    """All leases of a queue."""

    def __init__(self, incarnation: int, store: bytes) -> None:
        self._windows: dict[tuple[str, int], _Window] = {}
        self._base = incarnation << 32  # ids differ from those of other openings of the store
        # And from those of another store, in another process: its messages may be acknowledged here by mistake, as in a
        # batch of the wrong store, and sequences, table and consumer may all be the same.
        self._first = int.from_bytes(store[:4], "big")
        self._turns: dict[str, int] = {}
        self._by_holder: dict[str, set[int]] = {}  # the leases of each client, also some that have ended

    def shards_in_turn(self, consumer: str, shards: int) -> list[int]:
        """Return all shards, beginning with another one each time, so that none is starved."""
        turn = self._turns[consumer] = self._turns.get(consumer, -1) + 1
        return [(turn + shard) % shards for shard in range(shards)]

    def claim(
        self,
        consumer: str,
        shard: int,
        row: ConsumerRow,
        *,
        within: tuple[int, int],
        limit: int,
        now_s: float,
        until_s: float,
        holder: str = "",
    ) -> Claim | None:
        """Lease up to `limit` messages of [first, next) that are neither leased nor acknowledged."""
        window, (first, end) = self._window(consumer, shard, row), within
        free = ~row.flags() & (window.until_s <= now_s)
        free[: max(0, min(WINDOW, first - window.floor))] = False
        free[max(0, min(WINDOW, end - window.floor)) :] = False
        chosen = np.flatnonzero(free)[:limit]
        if not len(chosen):
            return None
        lease = self._base + ((self._first + next(_numbers)) & 0xFFFF_FFFF)
        if holder:
            self._by_holder.setdefault(holder, set()).add(lease)
        window.until_s[chosen] = until_s
        window.lease[chosen] = lease
        window.counts[chosen] = np.minimum(window.counts[chosen].astype(np.int64) + 1, DELIVERIES_MAX)
        return Claim(shard, first, chosen + window.floor, window.counts[chosen], lease)

    def _window(self, consumer: str, shard: int, row: ConsumerRow) -> _Window:
        window = self._windows.get((consumer, shard))
        if window is None:
            window = self._windows[consumer, shard] = _Window(row)
        window.move(row)
        return window

    def undo(self, consumer: str, claim: Claim, from_sequence: int = 0) -> None:
        """Undo a claim from a message on, including its delivery counts."""
        window = self._windows.get((consumer, claim.shard))
        indexes = None if window is None else window.indexes(claim.sequences[claim.sequences >= from_sequence])
        if window is not None and indexes is not None:
            indexes = indexes[window.lease[indexes] == claim.lease]
            window.until_s[indexes], window.lease[indexes] = 0, 0
            window.counts[indexes] -= 1

    def hold(self, ack: Ack, now_s: float) -> bool:
        """Whether every message is still under the lease that the acknowledgement names."""
        for (shard, ranges), leases in zip(ack.messages, ack.leases, strict=False):
            window = self._windows.get((ack.consumer, shard))
            if window is None or len(leases) != len(ranges):
                return False
            for (low, high), lease in zip(ranges, leases, strict=True):
                span = slice(low - window.floor, high - window.floor)
                if not 0 <= span.start < span.stop <= WINDOW:
                    return False
                if (window.lease[span] != lease).any() or (window.until_s[span] <= now_s).any():
                    return False
        return len(ack.leases) == len(ack.messages)

    def release(
        self,
        consumer: str,
        leases: Sequence[tuple[int, int, int]],
        row_of: Callable[[str, int], ConsumerRow],
        now_s: float,
        until_s: float,
    ) -> int:
        """Release leased messages, free again at `until_s`; return how many. Requires: as `has_leased`."""
        released = 0
        acknowledged: dict[int, NDArray[np.bool_]] = {}
        for shard, sequence, lease in leases:
            window = self._windows.get((consumer, shard))
            if window is None:
                continue
            if shard not in acknowledged:
                row = row_of(consumer, shard)
                window.move(row)
                acknowledged[shard] = row.flags()
            number = sequence - window.floor
            if not 0 <= number < WINDOW or acknowledged[shard][number]:
                continue
            if window.lease[number] == lease and window.until_s[number] > now_s:
                window.until_s[number], window.lease[number] = until_s, 0
                released += 1
        return released

    def extend(
        self,
        consumer: str,
        leases: Sequence[tuple[int, int, int]],
        row_of: Callable[[str, int], ConsumerRow],
        now_s: float,
        until_s: float,
    ) -> bool:
        """Extend leases until `until_s`; False, and nothing changes, if one has ended. Requires: as `has_leased`."""
        columns = np.array(leases, np.int64).reshape(-1, 3)
        extended: list[tuple[_Window, NDArray[np.int64]]] = []
        for shard in np.unique(columns[:, 0]).tolist():
            window = self._windows.get((consumer, shard))
            if window is None:
                return False
            row = row_of(consumer, shard)
            window.move(row)
            _, sequences, numbers = columns[columns[:, 0] == shard].T
            indexes = window.indexes(sequences)
            if indexes is None or row.flags()[indexes].any():
                return False
            if (window.lease[indexes] != numbers).any() or (window.until_s[indexes] <= now_s).any():
                return False
            extended.append((window, indexes))
        for window, indexes in extended:
            window.until_s[indexes] = until_s
        return True

    def has_leased(self, row_of: Callable[[str, int], ConsumerRow], now_s: float) -> bool:
        """Whether a message is leased and not acknowledged. Requires: `row_of` returns rows as `claim` gets them."""
        return any(self._leased_in(key, row_of, now_s) for key in self._windows)

    def count_leased(self, row_of: Callable[[str, int], ConsumerRow], now_s: float) -> Counter[str]:
        """Count the messages that each consumer has leased and not acknowledged. Requires: as `has_leased`."""
        counts: Counter[str] = Counter()
        for key in self._windows:
            counts[key[0]] += self._leased_in(key, row_of, now_s)
        return counts

    def _leased_in(self, key: tuple[str, int], row_of: Callable[[str, int], ConsumerRow], now_s: float) -> int:
        window, row = self._windows[key], row_of(*key)
        window.move(row)
        return int(((window.until_s > now_s) & (window.lease > 0) & ~row.flags()).sum())

    def leave(self, holder: str) -> None:
        """End all leases of a client that has closed its connection."""
        leases = np.fromiter(self._by_holder.pop(holder, ()), np.int64)
        for window in self._windows.values() if len(leases) else ():
            left = np.isin(window.lease, leases)
            window.until_s[left], window.lease[left] = 0, 0

    def end(self, consumer: str) -> None:
        """End all leases of a consumer."""
        self._windows = {key: window for key, window in self._windows.items() if key[0] != consumer}

    def next_lapse_s(self, consumer: str, now_s: float) -> float | None:
        """Return when the next lease of a consumer expires; None if it has none."""
        times = [
            window.until_s[window.until_s > now_s] for (name, _), window in self._windows.items() if name == consumer
        ]
        return min((float(ends_s.min()) for ends_s in times if len(ends_s)), default=None)

    def forget_idle(self, now_s: float) -> None:
        """Discard windows without leases: the ledger has everything else."""
        self._windows = {key: window for key, window in self._windows.items() if (window.until_s > now_s).any()}
        names = {name for name, _ in self._windows}
        leased = {lease for window in self._windows.values() for lease in np.unique(window.lease).tolist()}
        self._by_holder = {
            holder: running for holder, leases in self._by_holder.items() if (running := leases & leased)
        }
        self._turns = {name: turn for name, turn in self._turns.items() if name in names}
