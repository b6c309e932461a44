"""The offer board: work that other processes, such as a Spark driver, poll for.

It is the engine `spark`. A call becomes an offer of one or more parts; a driver takes it, renews it while it works, and
returns a result for each part. An offer that no driver takes, or whose driver falls silent, is withdrawn: its handle
raises `WorkerLost`, and the caller runs the work elsewhere.

Thread: any; `_lock` guards everything. The thread that waits for a handle also expires its offer: no thread of its own
does.
Invariants: (1) an offer is answered once. (2) a withdrawn offer accepts no result and gives access to no file. (3) at
most `waiting_max` offers are pending.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import Backpressure, Closed, Invalid, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.randomness import Random
from penstock.scheduler.engines import Handle
from penstock.scheduler.work import Plain, WorkCancelled, WorkerLost, WorkFailed, check_name, pack, unpack


@dataclass(frozen=True, kw_only=True)
class OfferSettings:
    """Time limits for drivers, and the number of pending offers."""

    waiting_max: int = 16
    silence_s: float = 15.0  # after which a driver counts as gone
    work_s_max: float = 6 * 3600.0  # for one offer, even if its driver renews it

    def __post_init__(self) -> None:
        if self.waiting_max < 1:
            raise Invalid(f"waiting_max is {self.waiting_max}: give 1 or more")
        for name in ("silence_s", "work_s_max"):
            if not 0 < getattr(self, name) < math.inf:
                raise Invalid(f"{name} is {getattr(self, name)}: give seconds, more than 0")


@dataclass(frozen=True, kw_only=True)
class JobPart:
    """One call of the function: its packed arguments, and the files it reads and may write, relative to the store."""

    arguments: bytes
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offer:
    """An offer as a driver gets it."""

    offer: str
    function: str
    parts: tuple[JobPart, ...]


class _PendingOffer(Handle):
    """A pending offer, and the handle of its caller."""

    def __init__(self, board: OfferBoard, offer: Offer, now_s: float, *, single: bool) -> None:
        super().__init__(offer.function, b"", board._cancel)
        self._board = board
        self.offer = offer
        self.single = single  # one part, whose result is the result of the call
        self.posted_s = now_s
        self.last_seen_s = now_s  # its driver; before it has one, the time of the offer
        self.taken = False

    def result(self, timeout_s: float) -> Plain:
        try:
            return super().result(timeout_s)
        except WaitExpired:
            self._board._expire(self)
            raise


class OfferBoard:
    """The engine whose workers are processes elsewhere."""

    def __init__(self, *, clock: Clock, random: Random, settings: OfferSettings | None = None) -> None:
        self._clock = clock
        self._random = random
        self._settings = settings or OfferSettings()
        self._lock = threads.lock("scheduler.offers")
        self._pending: dict[str, _PendingOffer] = {}  # guarded by _lock; in the order of submission
        self._slots = 0  # guarded by _lock: parts that the last driver seen runs at once
        self._driver_seen_s = -math.inf  # guarded by _lock
        self._closed = False  # guarded by _lock

    # -- for callers

    def slots(self) -> int:
        """Return how many parts drivers run at once; 0 if none was seen recently."""
        with self._lock:
            return self._slots if self._clock.monotonic_s() - self._driver_seen_s < self._settings.silence_s else 0

    def submit(self, function: str, arguments: Mapping[str, Plain]) -> Handle:
        """Offer a call in one part."""
        return self._add(function, [JobPart(arguments=pack(arguments))], single=True)

    def submit_parts(self, function: str, parts: Sequence[JobPart]) -> Handle:
        """Offer a call in several parts; its result is the list of their results."""
        if not parts:
            raise Invalid("an offer has at least one part")
        return self._add(function, parts, single=False)

    def _add(self, function: str, parts: Sequence[JobPart], *, single: bool) -> Handle:
        check_name(function)
        offer = Offer(self._random.randbytes(16).hex(), function, tuple(parts))
        with self._lock:
            if self._closed:
                raise Closed("the offer board was shut down: make a new one")
            if len(self._pending) >= self._settings.waiting_max:
                raise Backpressure(f"{len(self._pending)} offers are pending (limit): retry later")
            pending = _PendingOffer(self, offer, self._clock.monotonic_s(), single=single)
            self._pending[offer.offer] = pending
        return pending

    def shutdown(self, timeout_s: float) -> bool:
        """Withdraw every offer."""
        with self._lock:
            self._closed = True
            pending, self._pending = list(self._pending.values()), {}
        for offer in pending:
            offer.answer(b"", WorkCancelled(f"{offer.function} had not ended when the offer board was shut down"))
        return True

    def _cancel(self, handle: Handle) -> None:
        assert isinstance(handle, _PendingOffer)
        self._withdraw(handle, WorkCancelled(f"{handle.function} was cancelled on the offer board"))

    def _expire(self, pending: _PendingOffer) -> None:
        """Withdraw an offer whose driver is silent or late."""
        with self._lock:
            now_s, settings = self._clock.monotonic_s(), self._settings
            silent = now_s - pending.last_seen_s >= settings.silence_s
            late = now_s - pending.posted_s >= settings.work_s_max
            reason = "took too long" if late else "went silent" if pending.taken else "did not take it"
        if silent or late:
            self._withdraw(pending, WorkerLost(f"{pending.function} was offered to a driver that {reason}"))

    def _withdraw(self, pending: _PendingOffer, error: PenstockError) -> None:
        with self._lock:
            self._pending.pop(pending.offer.offer, None)
        pending.answer(b"", error)

    # -- for drivers

    def take(self, slots: int) -> Offer | None:
        """Return the oldest offer not yet taken, if any. `slots`: how many parts this driver runs at once."""
        if slots < 1:
            raise Invalid(f"a driver with {slots} slots cannot take work: give 1 or more")
        with self._lock:
            self._slots, self._driver_seen_s = slots, self._clock.monotonic_s()
            for pending in self._pending.values():
                if not pending.taken:
                    pending.taken, pending.last_seen_s = True, self._driver_seen_s
                    return pending.offer
        return None

    def renew(self, offer: str) -> bool:
        """Keep an offer alive while a driver works on it; False if it was withdrawn."""
        with self._lock:
            pending = self._pending.get(offer)
            if pending is None or not pending.taken:
                return False
            pending.last_seen_s = self._driver_seen_s = self._clock.monotonic_s()
            return True

    def finish(self, offer: str, results: Sequence[bytes]) -> bool:
        """Complete an offer with the packed result of each part; False if it was withdrawn."""
        pending = self._take_finished(offer)
        if pending is None:
            return False
        try:
            if len(results) != len(pending.offer.parts):
                raise Invalid(f"{len(results)} results were returned for {len(pending.offer.parts)} parts")
            packed = results[0] if pending.single else pack([unpack(result) for result in results])
        except (PenstockError, msgspec.DecodeError) as error:
            pending.answer(b"", WorkerLost(f"the results of {pending.function} cannot be used: {error}"))
            return False
        return pending.answer(packed, None)

    def fail(self, offer: str, reason: str) -> None:
        """Fail an offer, because one of its parts failed."""
        pending = self._take_finished(offer)
        if pending is not None:
            pending.answer(b"", WorkFailed("a driver", reason, "", permanent=False))

    def _take_finished(self, offer: str) -> _PendingOffer | None:
        with self._lock:
            pending = self._pending.get(offer)
            return self._pending.pop(offer) if pending is not None and pending.taken else None

    def check_file(self, offer: str, name: str, *, write: bool) -> None:
        """Raise `Invalid` unless a taken offer may access this file; renews the offer."""
        if not self.renew(offer):
            raise Invalid("the offer was withdrawn: stop working on it")
        with self._lock:
            pending = self._pending.get(offer)
            parts = () if pending is None else pending.offer.parts
        if not any(name in (part.writes if write else part.reads) for part in parts):
            raise Invalid(f"this offer does not {'write' if write else 'read'} {name}")

    def has_taken_offers(self) -> bool:
        """Return whether a driver works on an offer."""
        with self._lock:
            return any(pending.taken for pending in self._pending.values())
