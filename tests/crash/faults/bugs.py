"""Bugs that the campaign must find, seeded into a process of it before it opens anything."""

from __future__ import annotations

from penstock.host.os_files import OsFile
from penstock.partition import ledger
from penstock.partition.ledger_records import Verdict


def ignore_failed_sync() -> None:
    """A failed fdatasync counts as done, and what was written before it may be lost."""
    fdatasync = OsFile.fdatasync

    def careless(file: OsFile) -> None:
        try:
            fdatasync(file)
        except OSError:
            return

    OsFile.fdatasync = careless  # type: ignore[method-assign,assignment]


def never_sync() -> None:
    """Writes are acknowledged before anything is synced."""
    OsFile.fdatasync = lambda file: None  # type: ignore[method-assign,assignment]


def forget_tokens() -> None:
    """A token is never known to be used."""
    ledger._LedgerChanges._use_token = lambda *_: Verdict.ACCEPTED  # type: ignore[method-assign]


BUGS = {bug.__name__: bug for bug in (ignore_failed_sync, never_sync, forget_tokens)}


def seed(name: str) -> None:
    """Seed a bug by its name; none for an empty one."""
    if name:
        BUGS[name]()
