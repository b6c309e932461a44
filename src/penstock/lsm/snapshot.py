"""A tree at one LSN, for as long as a reader needs it.

Thread: any; a snapshot belongs to its reader, and another thread may call `close`.
Invariant: every read of a closed snapshot raises `Closed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from penstock.errors import Closed
from penstock.lsm.memtable import Memtable
from penstock.lsm.version import Version
from penstock.lsm.view import View


class Snapshot(View):
    """An unchanging view of one LSN. Its files are not deleted before it is closed."""

    __slots__ = ("__weakref__", "_forget", "lsn")

    def __init__(self, version: Version, now_us: int, forget: Callable[[Snapshot], None]) -> None:
        super().__init__(version, lambda: now_us)
        self.lsn = version.lsn
        self._forget = forget

    @property
    def now_us(self) -> int:
        """The time that decides which rows have expired."""
        return self._now_us()

    def under(self, rows: Memtable) -> View:
        """Return a view of this state with newer rows on top, valid while this snapshot is open."""
        return _Overlay(replace(self._version, frozen=(rows, *self._version.frozen)), self)

    @property
    def is_closed(self) -> bool:
        return isinstance(self._version, _ClosedVersion)

    def check_open(self) -> None:
        if isinstance(self._version, _ClosedVersion):
            self._version.refuse()

    def close(self) -> None:
        """Release its files."""
        self.end(_CLOSED)
        self._forget(self)

    def end(self, closed: _ClosedVersion) -> None:
        """Make every later read raise `Closed`."""
        if not self.is_closed:
            self._version = closed  # type: ignore[assignment]

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Overlay(View):
    """A snapshot with newer rows on top."""

    __slots__ = ("_snapshot",)

    def __init__(self, version: Version, snapshot: Snapshot) -> None:
        super().__init__(version, snapshot._now_us)
        self._snapshot = snapshot

    def check_open(self) -> None:
        self._snapshot.check_open()


class _ClosedVersion:
    """Replaces the version of a closed snapshot or tree."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def refuse(self) -> NoReturn:
        raise Closed(self._reason)

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse()


_CLOSED = _ClosedVersion("the snapshot was closed: take another")
TREE_CLOSED = _ClosedVersion("the table was dropped or the store was closed: open it again")
