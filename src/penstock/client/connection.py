"""A connection to the owner of a store, which reconnects when it is lost.

Thread: any.
Invariants: (1) a request that must not be repeated is sent once: if its answer is lost, `OutcomeUnknown`. (2) a line
(one Flight client) is used only after the owner at its end showed the identity of the store first connected to. (3)
every call has one deadline for finding or starting an owner, sending and the answer. The owner knows it, and frees its
thread then, even if the client is suspended. (4) `_lock` is never held during a wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from pyarrow import flight

from penstock.errors import (
    Backpressure,
    Closed,
    Invalid,
    NotFound,
    NotLeader,
    OutcomeUnknown,
    PenstockError,
    WaitExpired,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.forking import abandon
from penstock.host.waiting import Retries
from penstock.protocol import wire

T = TypeVar("T")
Page = list[tuple[int, Any]]  # record batches, each with the number of its range in the request
OWNER_TIMEOUT_S = 30.0  # for an owner to be found (again) and to answer
FORGET_S = 5.0  # for requests whose answer nobody needs
_NUMBERED = re.compile(r"number (\d+)(?= was dropped)")  # as `dropped_table` says it
NOT_LEADING = "this member of the cluster does not lead"
CALL_S_MIN = 0.05  # so that even an owner found at the last moment is asked


class OwnerLocator(Protocol):
    """Finds the owner of a store."""

    @property
    def name(self) -> str:
        """The store's name, for messages."""

    @property
    def folder(self) -> str:
        """The store's folder on this machine; empty if it is remote."""

    @property
    def patience_s(self) -> float | None:
        """How long to wait for one owner's first answer, if there may be another; None: until the deadline."""

    @property
    def answer_s(self) -> float | None:
        """How long to wait for an answer to what may be sent to another owner; None: until the deadline."""

    def open(self, deadline_s: float) -> flight.FlightClient:
        """Return a line to the owner, found or started before the deadline; `WaitExpired` if there is none."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of each request."""


class GoneError(Exception):
    """The owner is gone. `untouched`: it refused the request itself and did nothing."""

    def __init__(self, reason: str, *, untouched: bool) -> None:
        super().__init__(reason)
        self.untouched = untouched


class Connection:
    """Sends requests to the owner of one store."""

    def __init__(
        self,
        locator: OwnerLocator,
        *,
        clock: Clock,
        owner_timeout_s: float = OWNER_TIMEOUT_S,
        any_member: bool = False,
        linearizable: bool = False,
    ) -> None:
        """`any_member`: of a cluster, also one that does not take writes. `linearizable`: reads are confirmed."""
        self._locator = locator
        self._any_member = any_member
        self._headers = [(wire.READS_HEADER.encode(), wire.LINEARIZABLE.encode())] if linearizable else []
        self._clock = clock
        self._owner_timeout_s = owner_timeout_s
        self._lock = threads.lock("client.connection")
        self._line: flight.FlightClient | None = None  # guarded by _lock
        self._owner: wire.Owner | None = None  # guarded by _lock; of the newest line
        self._closed = False  # guarded by _lock
        self._in_child = False
        self.table_names: dict[int, str] = {}  # of every table that this client saw, for errors
        self.missing = 0  # how often the owner did not find something, or was another one: see `FlightPort.recent`

    def disable_after_fork(self) -> None:
        """In a forked child: refuse everything, without taking a lock that no thread there will release."""
        self._in_child = True
        if self._line is not None:
            abandon(self._line)

    @property
    def owner(self) -> wire.Owner:
        """The owner at the other end; connects if necessary."""
        self._open(self.deadline_s())
        assert self._owner is not None
        return self._owner

    @property
    def folder(self) -> str:
        """The store's folder on this machine; empty if it is remote."""
        return self._locator.folder

    @property
    def owner_timeout_s(self) -> float:
        """How long a call waits, in seconds."""
        return self._owner_timeout_s

    def deadline_s(self, more_s: float = 0.0) -> float:
        """Return the deadline of a call that begins now."""
        return self._clock.monotonic_s() + self._owner_timeout_s + more_s

    def _left_s(self, deadline_s: float) -> float:
        return max(CALL_S_MIN, deadline_s - self._clock.monotonic_s())

    def bounded(self, timeout_s: float, wait_s: float = 0.0) -> float:
        """Return how long to wait for an owner, if the request may be sent to another one after that."""
        answer_s = self._locator.answer_s
        return timeout_s if answer_s is None else min(timeout_s, answer_s + wait_s)

    # -- asking

    def ask(
        self,
        request: Any,
        kind: type[T],
        *,
        repeat: bool = True,
        wait_s: float = 0.0,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Return the decoded answer to a request: see `ask_raw`. `undo` gets it if the caller was interrupted."""
        undo_raw = None if undo is None else lambda answer: undo(wire.unpack(answer, kind))
        return wire.unpack(self.ask_raw(request, repeat=repeat, wait_s=wait_s, undo=undo_raw), kind)

    def ask_raw(
        self,
        request: Any,
        *,
        repeat: bool = True,
        wait_s: float = 0.0,
        undo: Callable[[bytes], object] | None = None,
    ) -> bytes:
        """Return the packed answer. `repeat`: the request may be sent twice. `wait_s`: how long the owner may wait."""
        body, deadline_s = wire.pack(request), self.deadline_s(wait_s)
        retries = Retries(self._clock, deadline_s)
        while True:
            line = self._open(deadline_s)
            try:
                left_s = self._left_s(deadline_s)
                return self._send(line, body, self.bounded(left_s, wait_s) if repeat else left_s, undo)
            except GoneError as error:
                self._drop(line)
                if not repeat and not error.untouched:
                    raise OutcomeUnknown(
                        f"the owner of {self._locator.name} did not answer ({error}): "
                        f"{type(request).__name__} may have happened or not"
                    ) from None
                if not retries.again():
                    raise self._no_answer(error) from None
            except (NotLeader, OutcomeUnknown) as changed:  # of a cluster: another member leads, or soon will
                in_cluster = self._owner is not None and self._owner.durability == "quorum" and not self._any_member
                if not in_cluster or not (repeat or isinstance(changed, NotLeader)):
                    raise
                self._drop(line)
                if not retries.again():
                    raise

    def send_once(self, request: Any, timeout_s: float) -> bytes:
        """Send a request once, over the current line or a new one; `GoneError` if no answer comes."""
        line = self._open(min(self.deadline_s(), self._clock.monotonic_s() + timeout_s))
        try:
            return self._send(line, wire.pack(request), timeout_s)
        except GoneError:
            self._drop(line)
            raise

    def _send(
        self,
        line: flight.FlightClient,
        body: bytes,
        timeout_s: float,
        undo: Callable[[bytes], object] | None = None,
    ) -> bytes:
        action, options = flight.Action(wire.PROTOCOL, body), self._options(timeout_s)
        undo_answers = None if undo is None else lambda answers: undo(_joined(answers))
        try:
            answers = threads.run_interruptible(lambda: list(line.do_action(action, options)), undo=undo_answers)
        except flight.FlightError as error:
            raise self._error_of(error) from None
        return _joined(answers)

    def read(self, reading: wire.Reading, *, wait_s: float = 0.0) -> tuple[Page, bool]:
        """Return a page, and whether there are more. `wait_s`: how long the owner may work."""
        deadline_s = self.deadline_s(wait_s)
        retries = Retries(self._clock, deadline_s)
        while True:
            line = self._open(deadline_s)
            try:
                left_s = self._left_s(deadline_s)
                is_first = not isinstance(reading, wire.More)
                return self._read_page(line, wire.pack(reading), self.bounded(left_s, wait_s) if is_first else left_s)
            except GoneError as error:
                self._drop(line)
                if isinstance(reading, wire.More):
                    raise Closed(
                        f"the owner of {self._locator.name} ended while this was read: read it again"
                    ) from None
                if not retries.again():
                    raise self._no_answer(error) from None

    def _read_page(self, line: flight.FlightClient, ticket: bytes, timeout_s: float) -> tuple[Page, bool]:
        more, batches, options = False, list[tuple[int, Any]](), self._options(timeout_s)
        try:
            chunks = threads.run_interruptible(lambda: list(line.do_get(flight.Ticket(ticket), options)))
            for chunk in chunks:
                mark = chunk.app_metadata
                source, more = (0, False) if mark is None else wire.read_mark(mark.to_pybytes())
                batches.append((source, chunk.data))
        except flight.FlightError as error:
            raise self._error_of(error) from None
        except pa.ArrowException as error:  # the stream ended within a batch
            raise GoneError(_first_line(error), untouched=False) from None
        return batches, more

    def pages(self, reading: wire.Begin, *, wait_s: float = 0.0) -> Iterator[Page]:
        """Return the pages of a scan or a query; the first is read before this returns."""
        retries = Retries(self._clock, self.deadline_s(wait_s), pause_s=0.1)
        while True:
            try:
                page, more = self.read(reading, wait_s=wait_s)
                return self._pages(reading, page, more, wait_s)
            except Backpressure:  # others are reading: wait for a turn
                if not retries.again():
                    raise

    def _pages(self, reading: wire.Begin, page: Page, more: bool, wait_s: float) -> Iterator[Page]:
        try:
            yield page
            while more:
                page, more = self.read(wire.More(reading.scan), wait_s=wait_s)
                yield page
        finally:
            if more:
                self.forget(wire.CloseScan(reading.scan))

    def forget(self, request: Any) -> None:
        """Send a close request without retrying: if it is lost, the lease expires."""
        if self._in_child:
            return
        line = self._line  # without the lock: a finalizer may call this in a thread that holds it
        if line is not None:
            try:
                self._send(line, wire.pack(request), min(FORGET_S, self._owner_timeout_s))
            except (GoneError, PenstockError):
                return

    # -- errors

    def error_of(self, fault: wire.ErrorMessage) -> PenstockError:
        """Return the error of a fault; an owner knows no names of tables that were dropped before it began."""
        error = wire.error_of(fault)
        if not isinstance(error, NotFound):
            return error
        self.missing += 1
        return NotFound(_NUMBERED.sub(lambda match: self.table_names.get(int(match[1]), match[0]), str(error)))

    def _error_of(self, error: flight.FlightError) -> Exception:
        """Return the error that an error of the transport carries."""
        fault = wire.decode_fault(error.extra_info)
        if fault is not None:
            if fault.name in (wire.LEAVING, wire.ENDING):
                return GoneError(fault.message, untouched=fault.name == wire.LEAVING)
            return self.error_of(fault)
        if isinstance(error, flight.FlightTimedOutError):
            return GoneError("no answer in time", untouched=False)
        if isinstance(error, (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)):
            return Invalid(f"the owner refused the request: {_first_line(error)}")
        return GoneError(_first_line(error), untouched=False)

    # -- the line

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=[*self._locator.headers(), *self._headers])

    def check_open(self) -> None:
        """Raise `Closed` if this connection was closed, or made before a fork."""
        if self._in_child:
            raise Closed("this connection was made before a fork: connect in this process")
        if self._closed:  # without the lock: it never becomes False again
            raise self.closed()

    def closed(self) -> Closed:
        """Return the error for a use after `close`."""
        return Closed(f"the connection to {self._locator.name} was closed: connect again")

    def _open(self, deadline_s: float) -> flight.FlightClient:
        if self._in_child:
            self.check_open()
        while (line := self._line) is None:  # several threads may look for the owner: the first line wins
            self.check_open()
            self._find_owner(deadline_s)
        return line

    def _find_owner(self, deadline_s: float) -> None:
        """Try once to open a line to an owner."""
        line = self._locator.open(deadline_s)
        try:
            left_s, patience_s = self._left_s(deadline_s), self._locator.patience_s
            answer = self._send(
                line, wire.pack(wire.Hello()), left_s if patience_s is None else min(left_s, patience_s)
            )
            owner = wire.unpack(answer, wire.Owner)
            if not owner.takes_writes and not self._any_member:
                raise GoneError(NOT_LEADING, untouched=True)
        except GoneError as error:
            line.close()
            if not Retries(self._clock, deadline_s).again():
                raise self._no_answer(error) from None
            return
        with self._lock:
            if self._owner is not None and owner.uuid != self._owner.uuid:
                raise Closed(f"there is another store in {self._locator.name} than before: connect again")
            if self._line is None and not self._closed:
                self._owner, self._line = owner, line

    def _drop(self, line: flight.FlightClient) -> None:
        self.missing += 1
        with self._lock:
            if self._line is line:
                self._line = None

    def _no_answer(self, cause: Exception) -> WaitExpired:
        # Another try at a member that follows ends the same way, as long as another one leads.
        remedy = (
            "give the addresses of all members, or wait until one leads" if str(cause) == NOT_LEADING else "try again"
        )
        return WaitExpired(
            f"no owner of {self._locator.name} answered within {self._owner_timeout_s} s ({cause}): {remedy}"
        )

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            line, self._line = self._line, None
        if line is not None:
            line.close()
        threads.end_idle_helpers()


def _joined(answers: list[Any]) -> bytes:
    return b"".join(answer.body.to_pybytes() for answer in answers)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
