"""The queue against crashes, crashes in recovery, faults crossed with crashes and rot; seeded bugs must be caught."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from queue_scenario import FOLDER, START_US, QueueScenario, StoreScenario, User, observe, open_queue
from shared import Patch, fsync_retried, no_directory_fsync, seeded

import penstock.queue.chain as chain_module
import penstock.testing.disk_files as disk_module
from penstock.errors import CorruptionError
from penstock.queue import ActiveFileState, FileTable, Messages, PersistentQueue, QmftManifest, QmftWriter
from penstock.queue.chain import FileChain, QueueRepair
from penstock.queue.files import OPENING_BYTES, DataReader, DataWriter, FilePosition
from penstock.queue.qmft import data_files
from penstock.queue.tail import QueueTail, scan_tail
from penstock.testing import Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import absent, steps


class MidRoll(QueueScenario):
    """A roll and a tail that nobody was told of: small, for crashes during recovery."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = User(open_queue(disk, 1), history, "a")
        self.step(user, lambda: user.write((30,), (500, 5)))
        self.step(user, lambda: user.append(900))
        self.step(user, lambda: user.write((440,)))
        self.step(user, lambda: user.append(10, 20))

    def go_on(self, queue: PersistentQueue, user: User) -> None:
        user.write((440,))


def crashes() -> None:
    explore(QueueScenario(), depth=1)


# A record is synced, a file is begun, a manifest written into its slot, the pointer moved, a trimmed file removed.
STEPS = (
    "fdatasync .data",
    "create .data",
    "fsync .data",
    "pwrite manifest.#",
    "fsync manifest.#",
    "pwrite manifest.current",
    "fsync manifest.current",
    "rename manifest.current",
    "fsync_dir",
    "unlink .data",
    "rmdir",
)


def crashes_in_recovery() -> None:
    report = explore(MidRoll(), modes=("restart",), recovery_modes=("strict", "torn"))
    assert report.missing_in_recovery("create .data", "fsync manifest.#", "rename manifest.current", "fdatasync") == []


def failed_syncs() -> None:
    for operations, every in ((("fdatasync",), 1), (("fsync", "fsync_dir"), 3)):
        faults = Faults(kinds=("eio",), operations=operations, every=every, images_every=9)
        explore(MidRoll(), modes=("restart",), recovery_modes=("strict",), depth=2 if every == 1 else 1, faults=faults)


def pointer_in_the_page_cache() -> None:
    """The fsync of the pointer fails at a roll and the process dies; the next one builds on what the cache shows."""
    disk, history = SimulatedDisk(), History()
    user = User(open_queue(disk, 1), history, "a")
    user.write((900,))
    fsync = disk_module.SimulatedFile.fsync

    def fail(file: disk_module.SimulatedFile) -> None:
        if file.path.endswith("manifest.current"):
            disk._faults[disk.operations + 1] = "eio"
        fsync(file)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="simulated eio"):
        patch.setattr(disk_module.SimulatedFile, "fsync", fail)
        user.append(900)
    after = disk.image().restore("restart")
    queue = open_queue(after, 2)
    history.note("state", *observe(queue))
    User(queue, history, "b", user.time_us).write((40,))
    MidRoll().resume(after.image().restore("strict"), history)


def store_crashes() -> None:
    report = explore(StoreScenario(), depth=1)
    assert report.missing("create .data", "fdatasync .data", "fsync manifest.#", "pwrite manifest.current") == []


def test_every_crash() -> None:
    report = explore(QueueScenario(), depth=1)
    assert report.operations > 200
    assert report.missing(*STEPS) == []


def test_a_step_that_is_no_longer_reached_is_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(FileChain, "drop_oldest", lambda self, count: None)
    disk = SimulatedDisk()
    disk.on_image = lambda: 0
    QueueScenario().run(disk, History())
    assert "unlink .data" in absent(steps(disk.images), *STEPS)


def test_every_crash_in_recovery() -> None:
    crashes_in_recovery()


def test_every_crash_under_a_journal_replays_to_the_same_sequences() -> None:
    store_crashes()


def test_failed_syncs_crossed_with_crashes() -> None:
    failed_syncs()


def test_a_pointer_in_the_page_cache_is_made_durable_before_anything_builds_on_it() -> None:
    pointer_in_the_page_cache()


@pytest.mark.parametrize("scenario", [MidRoll(), StoreScenario()])
def test_faults_crossed_with_crashes(scenario: QueueScenario | StoreScenario) -> None:
    report = explore(scenario, modes=("strict", "torn"), depth=1, faults=Faults(every=9, images_every=11))
    assert report.faults > 25


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", [QueueScenario(), StoreScenario()])
def test_every_fault_crossed_with_every_crash(scenario: QueueScenario | StoreScenario) -> None:
    explore(scenario, torn_seeds=2)
    explore(scenario, depth=1, faults=Faults())


# -- damage


def damaged_queue() -> tuple[SimulatedDisk, list[str], dict[int, bytes]]:
    """A closed queue with a sealed file and an active one."""
    disk, history = SimulatedDisk(), History()
    queue = open_queue(disk, 1)
    user = User(queue, history, "a")
    user.write((5, 40), (600,), (13,), (700, 3), (400,), (3, 0, 8))
    _, messages = observe(queue)
    queue.close()
    return disk, sorted(data_files(disk, FOLDER)), messages


def test_every_flipped_bit_of_a_data_file_is_told_or_harmless() -> None:
    disk, paths, messages = damaged_queue()
    assert len(paths) == 2
    image = disk.image()
    for path in paths:
        for bit in range(0, disk.open(f"{FOLDER}/{path}").size() * 8, 7):
            copy = image.restore("kept")
            copy.flip(f"{FOLDER}/{path}", bit)
            try:
                _, copied = observe(open_queue(copy, 2))
            except CorruptionError as error:
                assert error.path == f"{FOLDER}/{path}"
                continue
            assert copied == messages  # an index record of a sealed file: it only makes finding faster
            assert path == paths[0]


def test_the_others_stay_readable_on_request() -> None:
    disk, paths, messages = damaged_queue()
    reader = DataReader.open(disk, FOLDER, paths[0], None)
    (_, _), (offset, second), *_ = reader.records(OPENING_BYTES, reader.file.size())
    for at in (0, 4, 9, 17, 25, 40, 100):  # checksum, length, flags, index, synced, body
        copy = disk.image().restore("kept")
        copy.flip(f"{FOLDER}/{paths[0]}", (offset + at) * 8)
        queue = open_queue(copy, 2)
        assert [b.first for b in queue.read(1, limit_messages=2)] == [1]
        with pytest.raises(CorruptionError) as caught:
            queue.read(1)
        assert (caught.value.path, caught.value.offset) == (f"{FOLDER}/{paths[0]}", offset)
        readable: dict[int, bytes] = {}
        for batch in queue.read(1, past_damage=True):
            readable.update(enumerate(batch.payloads.to_pylist(), batch.first))
        assert readable == {s: p for s, p in messages.items() if s != second.index}
        assert next(b.first for b in queue.read(second.index, past_damage=True)) == second.index + 1


def test_damage_to_a_stored_record_is_told_in_a_store_though_nothing_follows_it() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk, 1, cut_after_lsn=0)
    queue.append(Messages.of([b"one"]), lsn=5, time_us=START_US)
    offset = queue._files.position.offset
    queue.append(Messages.of([b"two" * 9]), lsn=8, time_us=START_US)
    queue.sync()
    copy = disk.image().restore("strict")
    copy.flip(f"{FOLDER}/{next(data_files(disk, FOLDER))}", (offset + 70) * 8)
    with pytest.raises(CorruptionError, match="message 2 was synced"):
        open_queue(copy, 2, cut_after_lsn=8)
    assert open_queue(copy.image().restore("kept"), 2, cut_after_lsn=5).next_sequence == 2  # 8 was not stored


# -- seeded bugs


def manifest_before_data_fsync(patch: Patch) -> None:
    def roll(self: FileChain, time_us: int) -> DataWriter:
        file = self.active
        assert file is not None
        following = self._create(file.position, (), time_us)
        self.synced = file.position
        return self._install(following, file.position)

    patch.setattr(FileChain, "roll", roll)


def pointer_truncated(patch: Patch) -> None:
    def overwrite(self: QmftWriter, slot: int) -> None:
        file = self._fs.open(self._path("manifest.current"), write=True)
        file.truncate(0)
        file.pwrite(bytes([slot]), 0)
        file.fsync()

    patch.setattr(QmftWriter, "_overwrite_pointer", overwrite)


def no_manifest_at_creation(patch: Patch) -> None:
    write = QmftWriter.write

    def skip_first(self: QmftWriter, manifest: QmftManifest) -> None:
        if manifest.active_file.path:
            write(self, manifest)

    patch.setattr(QmftWriter, "write", skip_first)


def active_file_by_listing(patch: Patch) -> None:
    """Takes the newest file in the folders for the active one."""
    read = QmftWriter.read_latest

    def listed(self: QmftWriter) -> QmftManifest | None:
        manifest = read(self)
        newest = max(data_files(self._fs, self._folder), key=lambda path: path[-15:], default="")
        if manifest is None or newest == manifest.active_file.path or not newest:
            return manifest
        active = ActiveFileState(int(newest[-15:-5]), OPENING_BYTES, 0, newest)
        (first,) = struct.unpack("<Q", self._fs.open(f"{self._folder}/{newest}").pread(8, 16).ljust(8, b"\0"))
        return QmftManifest(first, active, manifest.files)

    patch.setattr(QmftWriter, "read_latest", listed)


def unlink_before_manifest(patch: Patch) -> None:
    drop = FileChain.drop_oldest

    def unlink_first(self: FileChain, count: int) -> None:
        self._obsolete += [self.sealed[index].path for index in range(count)]
        self.unlink_obsolete()
        drop(self, count)

    patch.setattr(FileChain, "drop_oldest", unlink_first)


def slot_not_synced(patch: Patch) -> None:
    fsync = disk_module.SimulatedFile.fsync
    patch.setattr(disk_module.SimulatedFile, "fsync", lambda f: None if f.path[-2:] in (".1", ".2") else fsync(f))


def one_slot_only(patch: Patch) -> None:
    write = QmftWriter._write_slot
    patch.setattr(
        QmftWriter,
        "_write_slot",
        lambda self, path, data, *, fresh: write(self, path[:-1] + "1", data, fresh=False),
    )
    patch.setattr(QmftWriter, "_overwrite_pointer", lambda self, slot: None)


def tail_trusted(patch: Patch) -> None:
    """Takes every sound record of the old file for durable."""

    def trusting(reader: DataReader, position: FilePosition, cut_after_lsn: int | None) -> QueueTail:
        tail = scan_tail(reader, position, cut_after_lsn)
        trusted = tail.trusted
        for record in tail.unsynced:
            trusted = trusted.after(record)
        return QueueTail(trusted, [], tail.end, tail.torn)

    patch.setattr(chain_module, "scan_tail", trusting)


def tail_dropped(patch: Patch) -> None:
    """Believes the manifest's write position alone."""

    def nothing(reader: DataReader, position: FilePosition, cut_after_lsn: int | None) -> QueueTail:
        return QueueTail(position, [], position.offset, None)

    patch.setattr(chain_module, "scan_tail", nothing)


def pointer_not_settled(patch: Patch) -> None:
    """Builds on a pointer that may be in the page cache only."""

    def nothing(self: QmftWriter) -> None:
        self._pointer_valid = True

    patch.setattr(QmftWriter, "secure_pointer", nothing)


def files_forgotten_at_roll(patch: Patch) -> None:
    name = FileChain._name_active
    patch.setattr(FileChain, "_name_active", lambda self, file, files: name(self, file, FileTable()))


def appended_again(patch: Patch) -> None:
    """In a store: keeps an unsynced tail that the journal will bring again."""
    open_chain = FileChain.open

    def keep(self: FileChain, cut_after_lsn: int | None) -> QueueRepair | None:
        repair = open_chain(self, None)
        if cut_after_lsn is not None:
            self.synced = FilePosition(self.synced.offset, self.synced.next_sequence, 0, self.synced.last_time_us)
            if self.active is not None:
                self.active.position = self.synced
        return repair

    patch.setattr(FileChain, "open", keep)


@pytest.mark.parametrize(
    ("seed_bug", "suite"),
    [
        (manifest_before_data_fsync, crashes),
        (pointer_truncated, crashes),
        (no_manifest_at_creation, crashes),
        (active_file_by_listing, crashes),
        (unlink_before_manifest, crashes),
        (slot_not_synced, crashes),
        (one_slot_only, crashes),
        (no_directory_fsync, crashes),
        (files_forgotten_at_roll, crashes),
        (tail_dropped, crashes),
        (tail_trusted, crashes_in_recovery),
        (fsync_retried, failed_syncs),
        (pointer_not_settled, pointer_in_the_page_cache),
        (tail_dropped, store_crashes),
        (appended_again, store_crashes),
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[Patch], None], suite: Callable[[], object]) -> None:
    with seeded(seed_bug), pytest.raises(Violation) as caught:
        suite()
    assert "recovery failed: A" not in str(caught.value)  # AttributeError and the like: the bug itself is broken
