"""The offer board: work for processes elsewhere that come and ask for it, as a Spark driver does.

It is the engine `spark`. A call is put up as an offer of one or several parts; a driver takes it, says now and then
that it is at it, and hands in a result for each part. An offer that nobody takes, or whose driver falls silent, is
withdrawn: its handle raises `WorkerLost`, and who made the call makes it elsewhere.

Thread: any; `_lock` guards everything. Who waits for a handle also looks after its offer: no thread runs for it.
Invariants: (1) an offer is answered once. (2) one that was withdrawn takes no result and lends no file any more. (3) at
most `waiting_max` are on the board.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import Backpressure, Closed, Invalid, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.randomness import Random
from penstock.host.clock import Clock
from penstock.scheduler.engines import Handle
from penstock.scheduler.work import Plain, WorkCancelled, WorkerLost, WorkFailed, check_name, pack, unpack


@dataclass(frozen=True, kw_only=True)
class OfferSettings:
    """How long drivers are waited for, and how much waits for them."""

    waiting_max: int = 16
    silence_s: float = 15.0  # a driver that was not heard of for so long is gone
    work_s_max: float = 6 * 3600.0  # for one offer, however alive its driver is

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
    """What a driver gets."""

    offer: str
    function: str
    parts: tuple[JobPart, ...]


class _Posted(Handle):
    """An offer on the board, for who waits for its result."""

    def __init__(self, board: OfferBoard, offer: Offer, now_s: float, *, alone: bool) -> None:
        super().__init__(offer.function, b"", board._cancel)
        self._board = board
        self.offer = offer
        self.alone = alone  # its one result is the result
        self.begun_s = now_s
        self.heard_s = now_s  # of its driver; before it has one, when it was put up
        self.taken = False

    def result(self, timeout_s: float) -> Plain:
        try:
            return super().result(timeout_s)
        except WaitExpired:
            self._board._look_after(self)
            raise


class OfferBoard:
    """The engine whose workers are processes elsewhere."""

    def __init__(self, *, clock: Clock, random: Random, settings: OfferSettings | None = None) -> None:
        self._clock = clock
        self._random = random
        self._settings = settings or OfferSettings()
        self._lock = threads.lock("scheduler.offers")
        self._posted: dict[str, _Posted] = {}  # guarded by _lock; in the order they came
        self._slots = 0  # guarded by _lock: what the last driver that asked can do at once
        self._asked_s = -math.inf  # guarded by _lock: when that was
        self._closed = False  # guarded by _lock

    # -- for who has work

    def slots(self) -> int:
        """How many parts drivers run at once; 0 if none was heard of lately."""
        with self._lock:
            return self._slots if self._clock.monotonic_s() - self._asked_s < self._settings.silence_s else 0

    def submit(self, function: str, arguments: Mapping[str, Plain]) -> Handle:
        """Put up a call in one part."""
        return self._post(function, [JobPart(arguments=pack(arguments))], alone=True)

    def submit_parts(self, function: str, parts: Sequence[JobPart]) -> Handle:
        """Put up a call in several parts; its result is the list of theirs."""
        if not parts:
            raise Invalid("an offer has at least one part")
        return self._post(function, parts, alone=False)

    def _post(self, function: str, parts: Sequence[JobPart], *, alone: bool) -> Handle:
        check_name(function)
        offer = Offer(self._random.randbytes(16).hex(), function, tuple(parts))
        with self._lock:
            if self._closed:
                raise Closed("the offer board was shut down: make a new one")
            if len(self._posted) >= self._settings.waiting_max:
                raise Backpressure(f"{len(self._posted)} offers are on the board (limit): retry later")
            posted = _Posted(self, offer, self._clock.monotonic_s(), alone=alone)
            self._posted[offer.offer] = posted
        return posted

    def shutdown(self, timeout_s: float) -> bool:
        """Withdraw every offer."""
        with self._lock:
            self._closed = True
            posted, self._posted = list(self._posted.values()), {}
        for one in posted:
            one.answer(b"", WorkCancelled(f"{one.function} had not ended when the offer board was shut down"))
        return True

    def _cancel(self, handle: Handle) -> None:
        assert isinstance(handle, _Posted)
        self._withdraw(handle, WorkCancelled(f"{handle.function} was cancelled on the offer board"))

    def _look_after(self, posted: _Posted) -> None:
        """Withdraw an offer that nobody works on."""
        with self._lock:
            now_s, settings = self._clock.monotonic_s(), self._settings
            silent, late = now_s - posted.heard_s >= settings.silence_s, now_s - posted.begun_s >= settings.work_s_max
            reason = "took too long" if late else "went silent" if posted.taken else "did not take it"
        if silent or late:
            self._withdraw(posted, WorkerLost(f"{posted.function} was offered to a driver that {reason}"))

    def _withdraw(self, posted: _Posted, error: PenstockError) -> None:
        with self._lock:
            self._posted.pop(posted.offer.offer, None)
        posted.answer(b"", error)

    # -- for drivers

    def take(self, slots: int) -> Offer | None:
        """The oldest offer that nobody took, if there is one. `slots`: how many parts this driver runs at once."""
        if slots < 1:
            raise Invalid(f"a driver with {slots} slots cannot take work: give 1 or more")
        with self._lock:
            self._slots, self._asked_s = slots, self._clock.monotonic_s()
            for posted in self._posted.values():
                if not posted.taken:
                    posted.taken, posted.heard_s = True, self._asked_s
                    return posted.offer
        return None

    def keep(self, offer: str) -> bool:
        """A driver says that it is at it; False: nobody wants it any more."""
        with self._lock:
            posted = self._posted.get(offer)
            if posted is None or not posted.taken:
                return False
            posted.heard_s = self._asked_s = self._clock.monotonic_s()
            return True

    def finish(self, offer: str, results: Sequence[bytes]) -> bool:
        """Hand in the packed result of each part; False: nobody wants them any more."""
        posted = self._settled(offer)
        if posted is None:
            return False
        try:
            if len(results) != len(posted.offer.parts):
                raise Invalid(f"{len(results)} results were handed in for {len(posted.offer.parts)} parts")
            packed = results[0] if posted.alone else pack([unpack(result) for result in results])
        except (PenstockError, msgspec.DecodeError) as error:
            posted.answer(b"", WorkerLost(f"the results of {posted.function} cannot be used: {error}"))
            return False
        return posted.answer(packed, None)

    def fail(self, offer: str, reason: str) -> None:
        """Hand in that a part failed."""
        posted = self._settled(offer)
        if posted is not None:
            posted.answer(b"", WorkFailed("a driver", reason, "", permanent=False))

    def _settled(self, offer: str) -> _Posted | None:
        with self._lock:
            posted = self._posted.get(offer)
            return self._posted.pop(offer) if posted is not None and posted.taken else None

    def check_file(self, offer: str, name: str, *, write: bool) -> None:
        """`Invalid` unless a file belongs to an offer that is being worked on; it counts as a sign of life."""
        if not self.keep(offer):
            raise Invalid("the offer was withdrawn: stop working on it")
        with self._lock:
            posted = self._posted.get(offer)
            parts = () if posted is None else posted.offer.parts
        if not any(name in (part.writes if write else part.reads) for part in parts):
            raise Invalid(f"{name} is no file that this offer {'writes' if write else 'reads'}")

    def engaged(self) -> bool:
        """Whether a driver works on an offer."""
        with self._lock:
            return any(posted.taken for posted in self._posted.values())
