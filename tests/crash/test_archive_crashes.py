"""The archive against every crash: a bucket on the simulated disk, so each step of each object is a crash point, too.

After recovery model and store agree, each object that a row or a run names is there and whole, a lost disk comes back
with everything up to the last run, and once collected nothing is left over, in the folder or in the bucket. With seeded
bugs that must be caught.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from shared import seeded
from store_model import SETTINGS

from penstock.archive.folder_objects import FolderObjects
from penstock.archive.objects import FILES, INDEX, ObjectStore
from penstock.archive.transfer import verify_object
from penstock.errors import CorruptionError, NotFound, PenstockError
from penstock.manifest.operations import SetResidency
from penstock.manifest.records import ChunkEntryRecord, Evicted, Local, RemoteArchived
from penstock.manifest.tables import CHUNKS
from penstock.store.archive_run import read_listing, run_numbers
from penstock.store.archive_settings import ArchiveSettings
from penstock.store.chunk_moves import ChunkMoves
from penstock.store.object_collection import ObjectCollector
from penstock.store.reattach import Reattachment
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.disk_image import Mode
from penstock.testing.manifest import MemoryEngine

URL = "file:///bucket"
ARCHIVE = ArchiveSettings(grace_s=0.0, runs_kept=1, interval_s=None, attempts_max=1)


def opened(disk: SimulatedDisk, path: str = "/store") -> Store:
    settings = replace(SETTINGS, archive=ARCHIVE)
    return open_store(
        path,
        fs=disk,
        clock=FakeClock(),
        random=random.Random(1),
        engine=MemoryEngine,
        settings=settings,
        archive=URL,
    )


def write(store: Store, number: int) -> None:
    with store.batch() as batch:
        batch.kv("keys").put(b"%d" % number, b"value")
        batch.queue("events").put(b"%d" % number)
    store.flush()


def rounds(store: Store) -> int:
    """How many rounds are there; both tables must have the same."""
    if not {"keys", "events"} <= set(store.tables()):
        return 0
    with store.snapshot() as snapshot:
        keys = sorted(int(key) for key, _ in snapshot.kv("keys").scan())
        events = [int(payload) for payload in snapshot.queue("events").to_arrow()["payload"].to_pylist()]
    if keys != events or keys != list(range(len(keys))):
        raise Violation(f"the tables are not of one moment: {keys} and {events}")
    return len(keys)


class ArchiveScenario:
    """Rounds of writing, archiving and evicting; a compaction replaces evicted files, and a table is dropped."""

    def __init__(self, count: int = 2) -> None:
        self._count = count

    def run(self, disk: SimulatedDisk, history: History) -> None:
        store = opened(disk)
        store.queue("events")
        store.kv("keys")
        store.kv("spare").put(b"key", b"value")
        for number in range(self._count):
            write(store, number)
            history.note("written", number + 1)
            store.compact("keys")
            if not number:
                store.compact("spare")
            store.archive()
            history.note("archived", number + 1)
            store.evict()
            if not number:
                store.drop("spare")
                history.note("dropped", 1)
                store._dropped.remove()
            store._collector.collect()
            store.collect_archive()

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        noted = {word: max([0, *(n for w, n in history.events if w == word)]) for word in ("written", "archived")}
        self._check_objects(disk)
        store = opened(disk)
        if rounds(store) < noted["written"]:
            raise Violation(f"{noted['written']} rounds were written, and {rounds(store)} are there")
        if ("dropped", 1) in history.events and "spare" in store.tables():
            raise Violation("a dropped table is back")
        if noted["archived"]:
            self._check_run(disk, noted["archived"], f"/again{len(disk.listdir('/'))}", store.uuid.hex())
            self._go_on(disk, store)
        store.close()

    def _check_objects(self, disk: SimulatedDisk) -> None:
        """No row says verified, or evicted, of an object that is not there and whole."""
        try:
            store = opened(disk)
        except PenstockError:
            return
        objects = FolderObjects(disk, "/bucket")
        for _, row in store._manifest.read(lambda view: list(CHUNKS.scan(view))):
            if is_trusted(row):
                try:
                    verify_object(objects, row.residency.object)  # type: ignore[union-attr]
                except CorruptionError as error:
                    raise Violation(f"{row.residency} has no sound object: {error}") from error
            elif not row.staged and not disk.exists(f"/store/{row.file_name}"):
                raise Violation(f"{row.file_name} is neither here nor in the archive")
        store.close()

    def _check_run(self, disk: SimulatedDisk, archived: int, path: str, store: str) -> None:
        objects = FolderObjects(disk, "/bucket")
        for number, whole in run_numbers(objects, store).items():
            for key in read_listing(objects, store, number).objects() if whole else ():
                if objects.size(key) is None:
                    raise Violation(f"run {number} lists {key}, which does not exist")
        work = Reattachment(
            disk, objects, clock=FakeClock(), random=random.Random(7), engine=MemoryEngine, stop=lambda: False
        )
        try:
            work.run(path, store, None)
        except NotFound as error:
            raise Violation(f"{archived} rounds were archived, and there is no run: {error}") from error
        copy = opened(disk, path)
        if rounds(copy) < archived:
            raise Violation(f"{archived} rounds were archived, and {rounds(copy)} came back")
        copy.close()
        for each in list(objects.listed(f"{store}/heirs")):  # as if the copy had never been: the store goes on
            objects.delete(each.key)

    def _go_on(self, disk: SimulatedDisk, store: Store) -> None:
        """The store is used further; once collected, nothing is left over."""
        count = rounds(store)
        write(store, count)
        store.compact("keys")
        for _ in range(2):
            store.archive()
            store.evict()
            store._dropped.remove()
            store._collector.collect()
            store._tasks.maintain_services()  # removes files of queues that a crash left
            store.collect_archive()
        if rounds(store) != count + 1:
            raise Violation("a round was lost after the recovery")
        report = store.check()
        if not report.ok or report.orphans:
            raise Violation(f"left over, or damaged: {report.orphans} {report.damage}")
        objects, uuid = FolderObjects(disk, "/bucket"), store.uuid.hex()
        there = {each.key for each in objects.listed(f"{uuid}/{FILES}")}
        needed: set[str] = set()
        for number in run_numbers(objects, uuid):
            needed.update(read_listing(objects, uuid, number).objects())
        for _, row in store._manifest.read(lambda view: list(CHUNKS.scan(view))):
            if not isinstance(row.residency, Local):
                needed.update((row.residency.object, row.residency.object + INDEX))
        if there - needed:
            raise Violation(f"objects that nothing names are left: {sorted(there - needed)}")


def is_trusted(row: ChunkEntryRecord) -> bool:
    return isinstance(row.residency, Evicted) or (isinstance(row.residency, RemoteArchived) and row.residency.verified)


STEPS = (
    "fsync .sst",  # in the bucket
    "rename LISTING.tmp",
    "unlink .sst",
    "fsync STORE.tmp",
    "rename ARCHIVE.tmp",
)


def test_some_crashes_of_an_archived_store() -> None:
    report = explore(ArchiveScenario(), modes=("strict",), depth=1, every=40)
    assert report.missing(*STEPS) == []


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["strict", "torn", "kept", "restart"])
def test_every_crash_of_an_archived_store(mode: Mode) -> None:
    explore(ArchiveScenario(3), modes=(mode,), depth=1)


@pytest.mark.campaign
def test_failing_disks_and_crashes() -> None:
    faults = Faults(kinds=("eio", "enospc"), every=37, images_every=41)
    explore(ArchiveScenario(), modes=("strict",), depth=1, every=97, faults=faults)


# -- seeded bugs


def verified_unread(patch: pytest.MonkeyPatch) -> None:
    """A chunk counts as verified before its object is written: a crash leaves a row that trusts nothing."""

    def archive(self: ChunkMoves, key: object, row: ChunkEntryRecord) -> int:
        if isinstance(row.residency, Local):
            name = f"{self._store}/files/{row.file_name}-00000000-1"
            for residency in (RemoteArchived(name), RemoteArchived(name, verified=True)):
                self._manifest.apply([SetResidency(key, residency)])  # type: ignore[arg-type]
        return 0

    patch.setattr(ChunkMoves, "archive", archive)


def unlinked_first(patch: pytest.MonkeyPatch) -> None:
    """A file is unlinked before its row says that it is evicted, and before it is archived at all."""
    before = ChunkMoves.archive

    def archive(self: ChunkMoves, key: object, row: ChunkEntryRecord) -> int:
        content = None
        path = f"{self._root}/{row.file_name}"
        if isinstance(row.residency, Local):
            file = self._fs.open(path)
            content = file.pread(file.size(), 0)
            file.close()
            self._fs.unlink(path)
            self._fs.fsync_dir(path.rpartition("/")[0])
            file = self._fs.create(path)
            file.pwrite(content, 0)
            file.fsync()
            self._fs.fsync_dir(path.rpartition("/")[0])
            file.close()
        return before(self, key, row)  # type: ignore[arg-type]

    patch.setattr(ChunkMoves, "archive", archive)


def deleted_while_named(patch: pytest.MonkeyPatch) -> None:
    """Objects are deleted although rows and runs name them."""
    patch.setattr(ObjectCollector, "_needed", lambda self, objects: set())


def listed_first(patch: pytest.MonkeyPatch) -> None:
    """A run's listing is written before its files are uploaded."""
    from penstock.store.archive_run import ArchiveRun

    publish, upload_own = ArchiveRun._publish, ArchiveRun._upload_own
    numbers: list[int] = []

    def early(self: ArchiveRun, number: int) -> None:
        numbers.append(number)
        objects = self._objects
        self._objects = _Deferred(objects)  # type: ignore[assignment]
        upload_own(self, number)

    def late(self: ArchiveRun, listing: object) -> None:
        deferred = self._objects
        assert isinstance(deferred, _Deferred)
        self._objects = deferred.objects
        publish(self, listing)  # type: ignore[arg-type]
        for key, data in deferred.pending:
            deferred.objects.put_new(key, data)

    patch.setattr(ArchiveRun, "_upload_own", early)
    patch.setattr(ArchiveRun, "_publish", late)
    patch.setattr("penstock.store.archive_run.check_object", lambda *_: None)


class _Deferred:
    def __init__(self, objects: ObjectStore) -> None:
        self.objects, self.pending, self.url = objects, list[tuple[str, bytes]](), objects.url

    def put_new(self, key: str, data: bytes) -> bool:
        self.pending.append((key, bytes(data)))
        return True


def never_collected(patch: pytest.MonkeyPatch) -> None:
    """Objects of replaced files stay for ever."""
    patch.setattr(ObjectCollector, "collect", lambda self, objects: 0)


@pytest.mark.parametrize("bug", [verified_unread, unlinked_first, deleted_while_named, listed_first, never_collected])
def test_seeded_bugs_of_the_archive_are_caught(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with seeded(bug), pytest.raises(Violation):
        explore(ArchiveScenario(), modes=("strict",), depth=1)
