"""Tries operations on a store: writes down what is tried and what became of it, and heals what a fault broke.

Thread: one for each actor; a `Watchdog` looks at all of them.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from faults.history import HistoryWriter, Note, Operation, Outcome, Reopened, Violation, Word
from penstock.errors import (
    Backpressure,
    Closed,
    DiskFull,
    FixTheCall,
    OutcomeUnknown,
    PartitionPaused,
    PenstockError,
    Poisoned,
    Restore,
    WaitExpired,
)
from penstock.store.tables import Tables

HEALING_S = 15.0  # for a store to take writes again when nothing fails any more
LIMIT_S = {  # what is documented, or the default of the call
    "batch": 60.0, "token": 60.0, "again": 60.0, "work": 60.0, "ack": 60.0, "load": 60.0, "drop": 60.0, "create": 60.0,
    "append": 60.0, "flush": 10.0, "open": 60.0, "close": 60.0, "recover": 60.0, "snapshot": 60.0,
}  # fmt: skip
LIMIT_S_DEFAULT = 30.0
MARGIN_S = 20.0
HUNG = 86  # what a process exits with whose call did not end

REFUSALS = (Backpressure, DiskFull, FixTheCall, PartitionPaused, Poisoned)  # nothing was written


class Watchdog:
    """Ends a process in which a call takes longer than it may, and shows where all its threads are."""

    def __init__(self, history: HistoryWriter, stacks: TextIO) -> None:
        self._history = history
        self._stacks = stacks
        self._calls: dict[int, tuple[str, float]] = {}  # by thread: the call, and its deadline
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, name: str, limit_s: float | None = None) -> None:
        limit_s = LIMIT_S.get(name, LIMIT_S_DEFAULT) if limit_s is None else limit_s
        self._calls[threading.get_ident()] = name, time.monotonic() + limit_s + MARGIN_S

    def end(self) -> None:
        self._calls.pop(threading.get_ident(), None)

    def _watch(self) -> None:
        while True:
            time.sleep(0.25)
            for name, end_s in list(self._calls.values()):
                if time.monotonic() > end_s:
                    faulthandler.dump_traceback(self._stacks, all_threads=True)
                    self._history.write(Violation("watchdog", f"hangs: {name} did not end in its time"))
                    os._exit(HUNG)


class Attempts:
    """What all actors do the same way."""

    def __init__(
        self, name: str, store: Tables, *, history: HistoryWriter, watchdog: Watchdog, first: int, client: bool
    ) -> None:
        self.name = name
        self.store: Any = store
        self.client = client
        self._history = history
        self._watchdog = watchdog
        self._number = first
        self._ailing = False  # a write failed: see `heal`
        self._paused: set[str] = set()

    def operation(self, kind: str, **fields: Any) -> Operation:
        self._number += 1
        return Operation(self.name, self._number, kind, client=self.client, begun_s=time.time(), **fields)

    def attempt(self, operation: Operation, act: Callable[[], Any], *, awaited: bool = True) -> Word:
        """Do it; `act` may return "duplicate", or the position of an append."""
        self._history.write(operation)
        word, error, answer = self.call(operation.kind, act)
        if word == "done" and answer == "duplicate":
            word = "duplicate"
        if word == "done" and not awaited:
            word = "written"
        position = answer if isinstance(answer, tuple) else None
        self._history.write(Outcome(self.name, operation.number, word, error, position, time.time()))
        return word

    def call(self, name: str, act: Callable[[], Any]) -> tuple[Word, str, Any]:
        """Do something within its time: done, refused or unknown, with the error and the answer."""
        self._watchdog.begin(name)
        try:
            return "done", "", act()
        except REFUSALS as error:
            self._fall_ill(error)
            return "refused", _show(error), None
        except PenstockError as error:
            if isinstance(error, Restore):
                self.complain(f"{name} speaks of damage, and there is none: {_show(error)}")
            self._fall_ill(error)
            return "unknown", _show(error), None
        except OSError as error:
            self.note(f"{name} raised {type(error).__name__} of the system")
            self._ailing = True
            return "unknown", _show(error), None
        except Exception as error:
            self.complain(f"{name} raised {_show(error)}")
            self._ailing = True
            return "unknown", _show(error), None
        finally:
            self._watchdog.end()

    def _fall_ill(self, error: PenstockError) -> None:
        if isinstance(error, PartitionPaused):
            self._paused.update(name for name in _tables(self.store) if f" {name} " in f" {error} ".replace(":", " "))
            self._ailing = True
        elif isinstance(error, (OutcomeUnknown, Poisoned, WaitExpired, DiskFull, Closed)):
            self._ailing = True

    # -- healing

    def heal(self) -> bool:
        """Do what the guide says after a failure; whether that went well."""
        if not self._ailing:
            return True
        word, error, _ = self.call("recover", self.store.recover)
        for name in sorted(self._paused) if not self.client else []:
            resumed, why, _ = self.call("recover", partial(self.store.resume, name))
            word, error = (word, error) if resumed == "done" else (resumed, why)
        if word != "done":
            self.note(f"healing failed: {error[:60]}")
            return False
        self._ailing = False
        self._paused.clear()
        return True

    def heal_for_good(self, prove: Callable[[], bool]) -> bool:
        """When nothing fails any more: heal until a write succeeds."""
        end_s = time.monotonic() + HEALING_S
        while True:
            self._ailing = True
            if self.heal() and prove():
                self._ailing = False
                return True
            if time.monotonic() > end_s:
                return False
            time.sleep(0.05)

    def reopened(self, store: Tables) -> None:
        """Go on with the store as it was opened again."""
        self.store = store
        self._ailing = False
        self._history.write(Reopened(self.name))

    # -- reports

    def note(self, text: str) -> None:
        self._history.write(Note(text))

    def complain(self, text: str) -> None:
        self._history.write(Violation(self.name, text))


def _tables(store: Any) -> list[str]:
    try:
        return list(store.tables())
    except (OSError, PenstockError):
        return []


def _show(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}"
