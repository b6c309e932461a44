"""A process that writes to all kinds, archives, evicts, drops and collects until it is killed.

Usage: archive_kill_child.py FOLDER FIRST. It prints "written N" once N rounds are durable, "archived N" once a run
holds them, and "evicted N" after an eviction of N files.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

from backup_kill_child import make_tables, say, write_round

import penstock
from penstock.errors import PenstockError, StoreLocked


def settings() -> penstock.StoreSettings:
    archive = penstock.ArchiveSettings(interval_s=None, grace_s=0.0, runs_kept=1, cache_bytes_max=20_000)
    return penstock.StoreSettings(archive=archive, serve=False, durable=True)


def opened(folder: Path, name: str = "store") -> penstock.Store:
    for left in reversed(range(200)):  # the workers of a killed owner notice its end a moment later
        try:
            return penstock.open(folder / name, settings=settings(), archive=f"file://{folder.absolute()}/archive")
        except StoreLocked:
            if not left:
                raise
            threading.Event().wait(0.1)
    raise AssertionError


def main(folder: Path, first: int) -> None:
    store = opened(folder)
    make_tables(store)
    written = [first]

    def write() -> None:
        while True:
            write_round(store, written[0])
            written[0] += 1
            say("written", written[0])

    threading.Thread(target=write, daemon=True).start()
    turn = 0
    while True:
        turn += 1
        store.kv(f"spare{turn}").put(b"key", b"value" * 100)
        store.compact(f"spare{turn}")
        for name in ("users", "metrics", "docs"):
            with suppress(PenstockError):
                store.compact(name, timeout_s=1.0)
        before = written[0]
        store.archive()
        say("archived", before)
        say("evicted", store.evict().files)
        store.kv("users").get(b"key 000000")
        store.drop(f"spare{turn}")
        store.collect_archive()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
