"""Leases on messages, in the owner's memory: who has which message, and until when.

For each consumer and shard there is a window over the messages above the floor, as columns: until when a message is
out, under which lease, and how often it was delivered.

Thread: the caller's lock.
Invariants: (1) a message that is out and whose time is not over is not claimed again. (2) a claim stays within the
window that the ledger can remember.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from penstock.queue.positions import DELIVERIES_MAX, WINDOW, Ack, ConsumerRow

# One count for all queues of a process: a message of another queue, or of one that was dropped and made again under the
# same name, is never taken for one of this queue that happens to have its number.
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Claim:
    """Messages of a shard under one lease."""

    shard: int
    first: int  # the oldest message of the shard at that time
    sequences: NDArray[np.int64]  # ascending
    deliveries: NDArray[np.uint8]  # of each of them, this one included
    lease: int


class _Window:
    """The messages [floor, floor + WINDOW) of a shard, as one consumer sees them."""

    def __init__(self, place: ConsumerRow) -> None:
        self.floor = place.floor
        self.until_s = np.zeros(WINDOW)
        self.lease = np.zeros(WINDOW, np.int64)
        self.counts = place.counts()

    def move(self, place: ConsumerRow) -> None:
        """Follow the floor; a step back (a seek) begins anew."""
        step = place.floor - self.floor
        if step < 0 or step >= WINDOW:
            self.__init__(place)  # type: ignore[misc]
        elif step:
            for column in (self.until_s, self.lease, self.counts):
                column[:-step] = column[step:]
                column[-step:] = 0
            self.floor = place.floor

    def places(self, sequences: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Where messages stand in the columns; None if one is not in the window."""
        places = np.asarray(sequences, np.int64) - self.floor
        return None if (places < 0).any() or (places >= WINDOW).any() else places


class Leases:
    """All leases of a queue."""

    def __init__(self, incarnation: int) -> None:
        self._windows: dict[tuple[str, int], _Window] = {}
        self._base = incarnation << 32  # ids of another opening of the store are never ours
        self._turns: dict[str, int] = {}

    def shards_in_turn(self, consumer: str, shards: int) -> list[int]:
        """All shards, another one first each time: none is starved."""
        turn = self._turns[consumer] = self._turns.get(consumer, -1) + 1
        return [(turn + shard) % shards for shard in range(shards)]

    def claim(
        self,
        consumer: str,
        shard: int,
        place: ConsumerRow,
        *,
        within: tuple[int, int],
        limit: int,
        now_s: float,
        until_s: float,
    ) -> Claim | None:
        """Lease up to `limit` messages of [first, next) that nobody has and nobody acknowledged."""
        window, (first, end) = self._window(consumer, shard, place), within
        free = ~place.flags() & (window.until_s <= now_s)
        free[: max(0, min(WINDOW, first - window.floor))] = False
        free[max(0, min(WINDOW, end - window.floor)) :] = False
        found = np.flatnonzero(free)[:limit]
        if not len(found):
            return None
        lease = self._base + next(_numbers)
        window.until_s[found] = until_s
        window.lease[found] = lease
        window.counts[found] = np.minimum(window.counts[found].astype(np.int64) + 1, DELIVERIES_MAX)
        return Claim(shard, first, found + window.floor, window.counts[found], lease)

    def _window(self, consumer: str, shard: int, place: ConsumerRow) -> _Window:
        window = self._windows.get((consumer, shard))
        if window is None:
            window = self._windows[consumer, shard] = _Window(place)
        window.move(place)
        return window

    def undo(self, consumer: str, claim: Claim, from_sequence: int = 0) -> None:
        """Take a claim back from a message on: as if it had never been."""
        window = self._windows.get((consumer, claim.shard))
        places = None if window is None else window.places(claim.sequences[claim.sequences >= from_sequence])
        if window is not None and places is not None:
            places = places[window.lease[places] == claim.lease]
            window.until_s[places], window.lease[places] = 0, 0
            window.counts[places] -= 1

    def hold(self, asked: Ack, now_s: float) -> bool:
        """Whether every message is under the lease it was got under."""
        for (shard, ranges), leases in zip(asked.messages, asked.leases, strict=False):
            window = self._windows.get((asked.consumer, shard))
            if window is None or len(leases) != len(ranges):
                return False
            for (low, high), lease in zip(ranges, leases, strict=True):
                some = slice(low - window.floor, high - window.floor)
                if not 0 <= some.start < some.stop <= WINDOW:
                    return False
                if (window.lease[some] != lease).any() or (window.until_s[some] <= now_s).any():
                    return False
        return len(asked.leases) == len(asked.messages)

    def release(
        self,
        consumer: str,
        leases: Sequence[tuple[int, int, int]],
        place_of: Callable[[str, int], ConsumerRow],
        now_s: float,
        until_s: float,
    ) -> int:
        """Give messages back that are still held; they are free from `until_s` on. How many. See `some_out`."""
        given = 0
        acknowledged: dict[int, NDArray[np.bool_]] = {}
        for shard, sequence, lease in leases:
            window = self._windows.get((consumer, shard))
            if window is None:
                continue
            if shard not in acknowledged:
                place = place_of(consumer, shard)
                window.move(place)
                acknowledged[shard] = place.flags()
            number = sequence - window.floor
            if not 0 <= number < WINDOW or acknowledged[shard][number]:
                continue
            if window.lease[number] == lease and window.until_s[number] > now_s:
                window.until_s[number], window.lease[number] = until_s, 0
                given += 1
        return given

    def some_out(self, place_of: Callable[[str, int], ConsumerRow], now_s: float) -> bool:
        """Whether a message is under a lease and not acknowledged. Requires: places as `claim` gets them."""
        for (consumer, shard), window in self._windows.items():
            place = place_of(consumer, shard)
            window.move(place)
            if ((window.until_s > now_s) & (window.lease > 0) & ~place.flags()).any():
                return True
        return False

    def end(self, consumer: str) -> None:
        """End all leases of a consumer."""
        self._windows = {key: window for key, window in self._windows.items() if key[0] != consumer}

    def next_lapse_s(self, consumer: str, now_s: float) -> float | None:
        """When the next lease of a consumer's messages lapses."""
        times = [
            window.until_s[window.until_s > now_s] for (name, _), window in self._windows.items() if name == consumer
        ]
        return min((float(some.min()) for some in times if len(some)), default=None)

    def forget_idle(self, now_s: float) -> None:
        """Let go of windows in which nothing is out: the ledger knows the rest."""
        self._windows = {key: window for key, window in self._windows.items() if (window.until_s > now_s).any()}
        names = {name for name, _ in self._windows}
        self._turns = {name: turn for name, turn in self._turns.items() if name in names}
