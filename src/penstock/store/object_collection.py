"""Deletes objects of the archive that nothing names.

An object is needed if a row of the manifest names it, if one of the runs that are kept does, or if a version that is
being read holds its file. Only objects that this store uploaded are ever listed here, so inherited ones stay. If
another store was made from this archive (`reattach`), nothing is deleted at all: that store reads the same objects.

Since when each object is unneeded is written to the file `UNNEEDED` of the store: one that is never open for as long as
the grace period must collect, too. If the file is lost, the grace period begins anew.

Thread: one at a time (`StoreArchive` takes turns, so that nothing is uploaded meanwhile).
Invariant: an object is deleted only after it was unneeded for the grace period, and again when it is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from penstock.archive.objects import FILES, INDEX, LISTING, ObjectStore, parse_file_key
from penstock.archive.plain import TemporaryFile
from penstock.errors import Invalid
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.readers import ReaderLeases
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import Local
from penstock.manifest.tables import CHUNKS
from penstock.store.archive_run import read_listing, run_numbers, run_prefix

logger = logging.getLogger(__name__)

HEIRS = "heirs"  # <uuid>/heirs/<uuid of a store that was made from this archive>
UNNEEDED_FILE = "UNNEEDED"  # JSON: since when, in milliseconds of the store's clock, by key
SSTABLE = ".sst"


class ObjectCollector:
    """The objects that this store uploaded."""

    def __init__(
        self,
        manifest: Manifest,
        maintenance: Maintenance,
        readers: ReaderLeases,
        *,
        fs: FileSystem,
        root: str,
        store: str,
        clock: Clock,
        grace_s: float,
        runs_kept: int,
    ) -> None:
        self._fs = fs
        self._path = f"{root}/{UNNEEDED_FILE}"
        self._manifest = manifest
        self._maintenance = maintenance
        self._readers = readers
        self._store = store
        self._clock = clock
        self._grace_ms = int(grace_s * 1_000)
        self._runs_kept = runs_kept
        self._unneeded_since_ms: dict[str, int] | None = None  # by key; None: not read yet

    def collect(self, objects: ObjectStore) -> int:
        """Delete runs that are not kept, and objects that nothing needs; return the number of objects deleted."""
        if any(True for _ in objects.listed(f"{self._store}/{HEIRS}")):
            return 0
        deleted = self._collect_runs(objects)  # also while others read: no reader gets the names of a run's own objects
        before = self._read() if self._unneeded_since_ms is None else self._unneeded_since_ms
        now_ms, needed = self._clock.time_us() // 1_000, self._needed(objects)
        listed = [each.key for each in objects.listed(f"{self._store}/{FILES}")]
        unneeded = {key: min(before.get(key, now_ms), now_ms) for key in listed if key not in needed}
        due = [key for key, since_ms in unneeded.items() if now_ms - since_ms >= self._grace_ms]
        if not self._readers.may_remove():  # a reader from before the opening may read files that were evicted
            due = []
        if due:
            needed = self._needed(objects)  # again: a reader may have begun since
        pinned = self._pinned()
        for key in due:
            if key not in needed and not _is_of(key, pinned):
                objects.delete(key)
                del unneeded[key]
                deleted += 1
        if unneeded != before:
            self._write(unneeded)
        self._unneeded_since_ms = unneeded
        return deleted

    def _read(self) -> dict[str, int]:
        try:
            file = self._fs.open(self._path)
        except FileNotFoundError:
            return {}
        try:
            return msgspec.json.decode(file.pread(file.size(), 0), type=dict[str, int])
        except msgspec.DecodeError:
            return {}
        finally:
            file.close()

    def _write(self, unneeded: dict[str, int]) -> None:
        try:
            out = TemporaryFile(self._fs, self._path)
            try:
                out.file.pwrite(msgspec.json.encode(unneeded), 0)
                out.publish()
            except BaseException:
                out.abort()
                raise
        except OSError as error:
            logger.warning("%s was not written, objects may be deleted later than they could be: %s", self._path, error)

    def _collect_runs(self, objects: ObjectStore) -> int:
        """Delete the runs that are not whole, and all whole ones but the newest."""
        runs = run_numbers(objects, self._store)
        newest = self._newest(runs)
        deleted = 0
        for number in runs:
            if number in newest:
                continue
            prefix = run_prefix(self._store, number)
            objects.delete(f"{prefix}/{LISTING}")  # first: without it the rest does not count
            for each in list(objects.listed(prefix)):
                objects.delete(each.key)
                deleted += 1
        return deleted

    def _newest(self, runs: dict[int, bool]) -> list[int]:
        return [number for number, whole in runs.items() if whole][-self._runs_kept :]

    def _needed(self, objects: ObjectStore) -> set[str]:
        needed = set(self._manifest.read(lambda view: list(_named(view))))
        for number in self._newest(run_numbers(objects, self._store)):
            needed.update(read_listing(objects, self._store, number).objects())
        return needed

    def _pinned(self) -> set[int]:
        """Return the chunk ids that a version holds; no two tables have the same."""
        return {chunk_id for tree, _ in self._maintenance.trees() for chunk_id in tree.pinned_ids()}


def _named(view: object) -> Iterator[str]:
    for _, row in CHUNKS.scan(view):  # type: ignore[arg-type]
        if not isinstance(row.residency, Local):
            yield row.residency.object
            yield row.residency.object + INDEX


def _is_of(key: str, pinned: set[int]) -> bool:
    """Whether a key is of an sstable that a version holds."""
    try:
        name = parse_file_key(key).file_name
    except Invalid:
        return False
    number = name.rpartition("/")[2].removesuffix(SSTABLE)  # not of files of queues, which have numbers of their own
    return number.isdecimal() and int(number) in pinned
