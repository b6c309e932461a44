"""The files that members read from each other: snapshots of a store, and files that records refer to.

Thread: `MemberFiles` has the thread of its connection; `FetchedFiles.admits` is called by the loop, and fetches in a
thread of its own.
Invariants: (1) only files of the store are read. (2) a record is admitted only when its files are whole, compared with
their hash, and synced. (3) at most one fetch runs.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from penstock.errors import Closed, CorruptionError, Invalid, NotFound, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_operations import make_dirs, remove_file
from penstock.host.files import File, FileSystem
from penstock.host.randomness import Random
from penstock.partition.reference import FETCHED, StagedFile, fetched_path, files_of, references_of
from penstock.replica.file_channel import PIECE_BYTES, FileClient, SnapshotListing
from penstock.store.shipping import Shipment, ship
from penstock.store.store import Store

logger = logging.getLogger(__name__)

AGAIN_S = 0.5  # after a fetch that failed
_STAGED = re.compile(r"tables/[0-9]+/[0-9]+/[0-9]{20}\.[a-z]+")


class Digest(Protocol):
    """A hash that grows."""

    def update(self, data: bytes, /) -> None: ...


class MemberFiles:
    """The files that another member reads here."""

    def __init__(self, fs: FileSystem, root: str, store: Callable[[], Store], random: Random) -> None:
        """`store` returns the open one; `WaitExpired` if there is none."""
        self._fs, self._root, self._store = fs, root, store
        self._name = random.randbytes(8).hex()
        self._lock = threads.lock("server.member_files")
        self._shipment: Shipment | None = None  # guarded by _lock
        self._ended = False

    def begin_snapshot(self) -> SnapshotListing:
        with self._lock:
            self._end_shipment()
            if self._ended:
                raise Closed("this member's store is closed: ask again later")
            store = self._store()
            shipment = ship(store, self._name, stop=lambda: self._ended)
            self._shipment = shipment
            return shipment.begin()

    def open(self, path: str) -> File:
        shipment = self._shipment
        if shipment is not None:
            with suppress(NotFound):
                return self._fs.open(shipment.path_of(path))
        if not _STAGED.fullmatch(path):
            raise Invalid(f"{path!r} is not a file that members read")
        for name in (path, fetched_path(path)):
            with suppress(FileNotFoundError):
                return self._fs.open(f"{self._root}/{name}")
        raise NotFound(f"{path} is not here any more: take a snapshot")

    def close(self) -> None:
        """End a snapshot, when its reader is gone or the store is to be closed."""
        self._ended = True  # before the lock: a snapshot that is being made ends early
        with self._lock:
            self._end_shipment()

    def _end_shipment(self) -> None:
        shipment, self._shipment = self._shipment, None
        if shipment is not None:
            shipment.close()


class FetchedFiles:
    """Fetches the files that records refer to, before the journal of this member has the records."""

    def __init__(self, fs: FileSystem, root: str, connect: Callable[[str], FileClient], clock: Clock) -> None:
        self._fs, self._root, self._connect, self._clock = fs, root, connect, clock
        self._thread: threading.Thread | None = None
        self._failed_s = -1e9
        self._closed = False
        self.lost: str | None = None  # the leader that has no such file any more: a snapshot has its rows

    def admits(self, body: bytes, leader: str) -> bool:
        """Whether every file that a record refers to is here, durably; if not, they are fetched from the leader."""
        missing = [file for file in references_of(body) if not self._has(file)]
        if not missing:
            return True
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and self._clock.monotonic_s() - self._failed_s >= AGAIN_S and not self._closed:
            self._thread = threads.spawn(lambda: self._fetch(missing, leader), name="penstock-fetch")
        return False

    def _has(self, file: StagedFile) -> bool:
        return all(
            self._fs.exists(f"{self._root}/{fetched_path(name)}") or self._fs.exists(f"{self._root}/{name}")
            for name in files_of(file.file_name)
        )

    def _fetch(self, files: list[StagedFile], leader: str) -> None:
        try:
            client = self._connect(leader)
            try:
                for file in files:
                    self._fetch_file(client, file)
            finally:
                client.close()
        except NotFound as error:
            logger.warning("a file that a record refers to is gone: %s", error)
            self.lost, self._failed_s = leader, self._clock.monotonic_s()
        except (PenstockError, OSError) as error:
            logger.warning("a file that a record refers to is fetched again later: %s", error)
            self._failed_s = self._clock.monotonic_s()

    def _fetch_file(self, client: FileClient, file: StagedFile) -> None:
        """Fetch a file, and its index if it has one; compare both with the hash in the record, then give them names."""
        for name in files_of(file.file_name):
            if not _STAGED.fullmatch(name):
                raise Invalid(f"a record refers to {name!r}, which is not a file of a table")
        make_dirs(self._fs, f"{self._root}/{FETCHED}")
        digest, size = hashlib.sha256(), 0
        paths = {name: f"{self._root}/{fetched_path(name)}" for name in files_of(file.file_name)}
        for name, path in paths.items():
            size += self._copy(client, name, f"{path}.part", digest, file.size_bytes)
        if (size, digest.digest()) != (file.size_bytes, file.digest):
            raise CorruptionError(file.file_name, 0, "the leader's file does not have the hash that its record names")
        for path in paths.values():
            self._fs.rename(f"{path}.part", path)
        self._fs.fsync_dir(f"{self._root}/{FETCHED}")

    def _copy(self, client: FileClient, name: str, path: str, digest: Digest, bytes_max: int) -> int:
        remove_file(self._fs, path)
        target, at = self._fs.create(path), 0
        try:
            while data := client.read_some(name, at, PIECE_BYTES):
                if self._closed or at + len(data) > bytes_max:
                    raise WaitExpired(f"{name} is larger than its record says, or this member stops")
                target.pwrite(data, at)
                digest.update(data)
                at += len(data)
            target.fsync()
        finally:
            target.close()
        return at

    def sweep(self, bodies: Iterable[bytes]) -> None:
        """Remove fetched files that no record of the journal refers to: its entry was cut."""
        try:
            names = set(self._fs.listdir(f"{self._root}/{FETCHED}"))
        except FileNotFoundError:
            return
        for body in bodies if names else ():
            for file in references_of(body):
                names -= {fetched_path(name).rpartition("/")[2] for name in files_of(file.file_name)}
        for name in names:
            remove_file(self._fs, f"{self._root}/{FETCHED}/{name}")

    def close(self) -> None:
        self._closed = True
