"""The queue itself: sequences, rolling, reading, seeking, trimming, failures, and how little an opening does."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import (
    Closed,
    CorruptionError,
    DiskFull,
    Invalid,
    ManifestCorrupted,
    ManifestNotFound,
    NotFound,
    Poisoned,
)
from penstock.queue import Messages, PersistentQueue, QmftWriter, QueueSettings
from penstock.queue.messages import SCHEMA
from penstock.queue.qmft import data_files
from penstock.testing import FakeClock, Fault, SimulatedDisk

FOLDER = "/q"
NOON_US = 1_769_083_200_000_000  # 2026-01-22T12:00:00Z
MINUTE_US = 60_000_000
SMALL = QueueSettings(file_bytes=2000, file_age_us=60 * MINUTE_US, allocate_bytes=512, index_bytes=256)


def open_queue(
    disk: SimulatedDisk, *, settings: QueueSettings = SMALL, clock: FakeClock | None = None, cut: int | None = None
) -> PersistentQueue:
    clock = clock or FakeClock(time_us=NOON_US)
    return PersistentQueue.open(
        disk, FOLDER, random=random.Random(disk.operations), clock=clock, settings=settings, cut_after_lsn=cut
    )


def fill(queue: PersistentQueue, batches: int, *, start: int = 0, step_us: int = 0) -> None:
    """Batches of three messages of about 100 bytes; batch n has time NOON_US + n * step_us."""
    for number in range(start, start + batches):
        payloads = [f"{number}.{n}".encode().ljust(100, b".") for n in range(3)]
        queue.append(Messages.of(payloads), time_us=NOON_US + number * step_us)
    queue.sync()


def payloads(queue: PersistentQueue, start: int | None = None, **limits: int) -> list[bytes]:
    batches = queue.read(queue.first_sequence if start is None else start, **limits)  # type: ignore[arg-type]
    return list(itertools.chain.from_iterable(batch.payloads.to_pylist() for batch in batches))


def test_sequences_begin_at_one_and_survive_reopening() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    assert (queue.first_sequence, queue.next_sequence) == (1, 1)
    assert queue.read(1) == []
    assert queue.append(Messages.of([b"a", b"b"])) == 1
    assert queue.append(Messages.of([b"c"])) == 3
    assert queue.append(Messages.of([])) == 4
    assert queue.next_sequence == 1  # nothing is synced yet
    assert queue.sync() == queue.next_sequence == 4
    queue.close()
    queue = open_queue(disk)
    assert queue.repair is None
    assert queue.append(Messages.of([b"d"])) == 4
    queue.sync()
    assert payloads(queue) == [b"a", b"b", b"c", b"d"]
    assert len(list(data_files(disk, FOLDER))) == 1  # a clean reopening goes on in the same file


def test_a_crash_before_the_first_roll_loses_no_sequence_number() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 2)
    again = open_queue(disk.image().restore("strict"))
    assert again.next_sequence == 7
    assert again.append(Messages.of([b"x"])) == 7


def test_every_column_comes_back() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    inputs = [
        Messages.of([b"a", b"", b"ccc"]),
        Messages.of([b"a", b"b"], [b"k", None]),
        Messages.of([b"a", b"b"], [b"", b"kk"], [5, 6]),
        Messages.of([b"a"], [None], np.array([NOON_US])),
        Messages.from_arrow(pa.array(["u", "vv"])),
        Messages.from_arrow(
            pa.table({"payload": pa.chunked_array([[b"1"], [b"2"]]), "key": [b"k", None], "time": [7, 8]})
        ),
        Messages.from_arrow(pa.array([b"0", b"1", b"2", b"3"])[1:3]),
    ]
    for messages in inputs:
        queue.append(messages)
    queue.sync()
    batches = queue.read(1)
    assert [batch.payloads.to_pylist() for batch in batches] == [m.payloads.to_pylist() for m in inputs]
    assert [batch.keys.to_pylist() for batch in batches] == [
        [None] * len(m) if m.keys is None else m.keys.to_pylist() for m in inputs
    ]
    assert [batch.times.tolist() for batch in batches] == [
        [NOON_US] * len(m) if m.times is None else m.times.tolist() for m in inputs
    ]
    for batch in batches:
        batch.record_batch().validate(full=True)
    middle = batches[1].slice(5, 6)
    assert (middle.first, middle.keys.to_pylist(), middle.payloads.to_pylist()) == (5, [None], [b"b"])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Messages.of([b"a"], [b"k", b"l"]),
        lambda: Messages.of([b"a"], None, [1, 2]),
        lambda: Messages.of(["text"]),  # type: ignore[list-item]
        lambda: Messages.from_arrow(pa.array([b"a", None])),
        lambda: Messages.from_arrow(pa.table({"payloads": [b"a"]})),
        lambda: Messages.from_arrow(pa.table({"payload": [b"a"], "time": pa.array([None], pa.int64())})),
        lambda: Messages.of([b"a"], [b"k" * 65_537]).check(),
    ],
)
def test_bad_messages_are_refused(bad: object) -> None:
    with pytest.raises(Invalid):
        bad()  # type: ignore[operator]


def test_bad_numbers_are_refused_and_change_nothing() -> None:
    queue = open_queue(SimulatedDisk())
    queue.append(Messages.of([b"a"]), lsn=7)
    for lsn in (0, 7):
        with pytest.raises(Invalid, match="LSN"):
            queue.append(Messages.of([b"b"]), lsn=lsn)
    for time in (-1, 1 << 62):
        with pytest.raises(Invalid, match="time"):
            queue.append(Messages.of([b"b"]), time_us=time)
    with pytest.raises(Invalid):
        queue.trim()
    with pytest.raises(Invalid):
        queue.trim(before_sequence=3)
    assert queue.append(Messages.of([b"b"])) == 2
    assert queue.last_lsn == 8
    assert queue.stored_lsn == 0
    queue.sync()
    assert queue.stored_lsn == 8


def test_limits_cut_batches_where_they_must() -> None:
    queue = open_queue(SimulatedDisk())
    fill(queue, 10)
    everything = payloads(queue)
    assert len(everything) == 30
    for start in range(1, 31):
        for count in (1, 2, 4, 7):
            assert payloads(queue, start, limit_messages=count) == everything[start - 1 : start - 1 + count]
        assert payloads(queue, start, limit_bytes=250) == everything[start - 1 : start + 1]
        assert payloads(queue, start, limit_bytes=1) == everything[start - 1 : start]  # at least one
    assert payloads(queue, 31) == []
    table = queue.scan_arrow(5, 12).read_all()
    assert table.schema == SCHEMA
    assert table.column("sequence").to_pylist() == list(range(5, 12))
    assert table.column("payload").to_pylist() == everything[4:11]
    assert queue.scan_arrow().read_all().num_rows == 30


def test_files_roll_by_size_and_by_age_and_lie_under_their_day() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 5)  # a batch takes about 370 bytes
    assert [entry.path for entry in queue._view.files] == []
    fill(queue, 1, start=5)
    assert [(e.start_sequence, e.end_sequence) for e in queue._view.files] == [(1, 15)]
    fill(queue, 1, start=59, step_us=MINUTE_US)
    assert len(queue._view.files) == 1
    fill(queue, 1, start=60, step_us=MINUTE_US)  # an hour after the file was begun
    assert len(queue._view.files) == 2
    fill(queue, 1, start=60 * 13, step_us=MINUTE_US)
    assert sorted(data_files(disk, FOLDER)) == [
        "2026/01/22/0000000001.data",
        "2026/01/22/0000000002.data",
        "2026/01/22/0000000003.data",
        "2026/01/23/0000000004.data",
    ]
    assert len(payloads(queue)) == 27


def test_a_clock_that_is_set_back_does_not_put_times_out_of_order() -> None:
    clock = FakeClock(time_us=NOON_US)
    queue = open_queue(SimulatedDisk(), clock=clock)
    queue.append(Messages.of([b"a"]))
    clock.jump(-86_400)
    queue.append(Messages.of([b"b"]))
    queue.sync()
    assert [batch.time_us for batch in queue.read(1)] == [NOON_US, NOON_US]


def test_seek_by_time() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 40, step_us=MINUTE_US)
    for reopened in (False, True):
        if reopened:
            queue.close()
            queue = open_queue(disk)
        assert queue.seek_time(0) == 1
        for number in range(40):
            assert queue.seek_time(NOON_US + number * MINUTE_US) == 3 * number + 1
            assert queue.seek_time(NOON_US + number * MINUTE_US - 1) == 3 * number + 1
        assert queue.seek_time(NOON_US + 39 * MINUTE_US + 1) == queue.next_sequence == 121
    assert open_queue(SimulatedDisk()).seek_time(5) == 1


def test_trim_drops_whole_files_manifest_first() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 30, step_us=20 * MINUTE_US)  # an hour is three batches: nine messages a file
    assert len(queue._view.files) == 9
    messages = queue.read(1, limit_messages=1)
    assert queue.trim(before_sequence=9) == 1
    assert queue.trim(before_sequence=10) == 10
    assert queue.trim(before_sequence=30) == 28
    disk.on_image = lambda: 0
    assert queue.trim(before_time_us=NOON_US + 12 * 20 * MINUTE_US) == 37
    labels = [image.label for image in disk.images]
    assert labels.index("fsync /q/manifest.current") < labels.index("unlink /q/2026/01/22/0000000004.data")
    with pytest.raises(NotFound, match="begins at 37"):
        queue.read(36)
    assert messages[0].payloads.to_pylist() == [b"0.0".ljust(100, b".")]
    assert len(payloads(queue)) == 90 - 36
    assert queue.trim(before_sequence=91) == 91  # the active file too
    assert queue.append(Messages.of([b"x"])) == 91
    assert queue.sync() == 92
    queue.close()
    queue = open_queue(disk)
    assert (queue.first_sequence, queue.next_sequence) == (91, 92)
    assert len(list(data_files(disk, FOLDER))) == 1


def test_trim_removes_empty_folders() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 3, step_us=24 * 60 * MINUTE_US * 20)
    assert disk.listdir(f"{FOLDER}/2026") == ["01", "02", "03"]
    queue.trim(before_sequence=7)
    assert disk.listdir(f"{FOLDER}/2026") == ["03"]


def test_a_reader_that_has_a_file_open_outlives_its_trim() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 30)
    scan = queue.scan_arrow()
    view = queue._view
    first = scan.read_next_batch()
    queue.trim(before_sequence=10)
    assert first.column("sequence").to_pylist() == [1, 2, 3]
    # The file it has open can be read on, though it is unlinked.
    assert queue._reader.read(view, 4, limit_messages=1, limit_bytes=1, past_damage=False)[0].first == 4


def test_readers_run_beside_the_writer() -> None:
    queue = open_queue(SimulatedDisk())
    fill(queue, 1)
    wrong: list[object] = []
    done = threading.Event()

    def follow() -> None:
        at = 1
        while not (done.is_set() and at == queue.next_sequence):
            try:
                batches = queue.read(at, limit_messages=7)
            except NotFound:
                at = queue.first_sequence
                continue
            except Exception as error:
                wrong.append(error)
                return
            for batch in batches:
                names = [
                    f"{(s - 1) // 3}.{(s - 1) % 3}".encode().ljust(100, b".") for s in range(batch.first, batch.next)
                ]
                if batch.payloads.to_pylist() != names:
                    wrong.append(batch)
                at = batch.next

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 200):
        fill(queue, 1, start=number)
        if number % 20 == 0:
            queue.trim(before_sequence=queue.next_sequence - 30)
    done.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []


# -- failures


def test_a_failed_sync_poisons_until_recover() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 1)
    queue.append(Messages.of([b"lost"]))
    disk._faults[disk.operations + 1] = "eio"
    with pytest.raises(OSError, match="simulated"):
        queue.sync()
    for call in (queue.sync, lambda: queue.append(Messages.of([b"x"])), lambda: queue.trim(before_sequence=1)):
        with pytest.raises(Poisoned, match="simulated"):
            call()
    assert queue.statistics().poisoned
    assert len(payloads(queue)) == 3  # what is synced can be read
    queue.recover()
    assert queue.append(Messages.of([b"again"])) == 4
    queue.sync()
    for mode in ("strict", "torn", "kept", "restart"):
        assert payloads(open_queue(disk.image().restore(mode)))[3:] == [b"again"]


def test_disk_full_is_met_before_bytes_are_written_and_does_not_poison() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 1)
    for room in (0, 100, 600, 1500):
        disk.capacity_bytes = sum(len(inode.live) for inode in disk._inodes.values()) + room
        for _ in range(9):
            try:
                fill(queue, 1)
            except DiskFull:
                break
        else:
            raise AssertionError("the disk is never full")
        disk.capacity_bytes = None
        fill(queue, 1)
    assert not queue.statistics().poisoned
    assert len(payloads(queue)) == queue.next_sequence - 1


def test_a_fault_at_creation_leaves_a_folder_that_opens() -> None:
    for at in range(1, 20):
        disk = SimulatedDisk(faults=(Fault(at, "eio"),))
        try:
            fill(open_queue(disk), 1)
        except OSError:
            queue = open_queue(disk)
            fill(queue, 1)
            assert len(payloads(queue)) == queue.next_sequence - 1


def test_closed() -> None:
    disk = SimulatedDisk()
    with open_queue(disk) as queue:
        fill(queue, 1)
    queue.close()
    for call in (queue.sync, queue.recover, lambda: queue.read(1), lambda: queue.seek_time(1)):
        with pytest.raises(Closed):
            call()


def test_closing_drains() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    queue.append(Messages.of([b"a"]))
    queue.close()
    disk = disk.image().restore("strict")
    manifest = QmftWriter(disk, FOLDER).read_latest()
    assert manifest is not None
    assert (manifest.next_sequence, manifest.active_file.message_count) == (2, 1)
    assert disk.open(f"{FOLDER}/{manifest.active_file.path}").size() == manifest.active_file.write_position
    queue = open_queue(disk)
    assert queue.repair is None
    assert payloads(queue) == [b"a"]


@pytest.mark.parametrize(
    ("pointer", "error"), [(None, ManifestNotFound), (b"", ManifestCorrupted), (b"\x03", ManifestCorrupted)]
)
def test_data_without_a_sound_pointer_is_no_fresh_queue(pointer: bytes | None, error: type[Exception]) -> None:
    disk = SimulatedDisk()
    with open_queue(disk) as queue:
        fill(queue, 1)
    path = f"{FOLDER}/manifest.current"
    disk.unlink(path)
    if pointer is not None:
        disk.create(path).pwrite(pointer, 0)
    before = {n: bytes(inode.live) for n, inode in disk._inodes.items()}, disk.listdir(FOLDER)
    with pytest.raises(error):
        open_queue(disk)
    assert ({n: bytes(inode.live) for n, inode in disk._inodes.items()}, disk.listdir(FOLDER)) == before


def test_a_missing_or_foreign_data_file_is_told() -> None:
    disk = SimulatedDisk()
    with open_queue(disk) as queue:
        fill(queue, 1)
    with pytest.raises(CorruptionError, match="another store"):
        PersistentQueue.open(disk, FOLDER, random=random.Random(1), clock=FakeClock(), identity=b"0123456789abcdef")
    disk.unlink(f"{FOLDER}/2026/01/22/0000000001.data")
    with pytest.raises(CorruptionError, match="missing"):
        open_queue(disk)
    with pytest.raises(Invalid):
        PersistentQueue.open(disk, FOLDER, random=random.Random(1), clock=FakeClock(), identity=b"short")
    with pytest.raises(Invalid):
        QueueSettings(file_bytes=10)
    with pytest.raises(Invalid):
        QueueSettings(file_age_us=0)


def test_a_missing_sealed_file_is_told_and_the_others_are_read() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 20)
    disk.unlink(f"{FOLDER}/2026/01/22/0000000002.data")
    with pytest.raises(CorruptionError, match=r"0000000002\.data.*missing"):
        queue.read(16)
    assert queue.read(31)[0].first == 31
    assert not queue.statistics().poisoned


def test_collect_removes_what_no_manifest_lists() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 10)
    disk.mkdir(f"{FOLDER}/2026/01/21")
    disk.create(f"{FOLDER}/2026/01/21/0000000009.data")
    assert queue.collect() == 1
    assert queue.collect() == 0
    assert len(payloads(queue)) == 30


# -- an opening does little


def operations_of_opening(messages: int) -> int:
    disk = SimulatedDisk()
    settings = QueueSettings(file_bytes=1 << 20, allocate_bytes=512, index_bytes=4096)
    queue = open_queue(disk, settings=settings)
    for _ in range(messages // 1000):
        queue.append(Messages.of([b"."] * 1000))
    queue.close()
    before = disk.operations
    open_queue(disk, settings=settings)
    return disk.operations - before


def test_opening_costs_the_same_for_few_and_many_messages() -> None:
    assert operations_of_opening(1_000) == operations_of_opening(400_000)


def test_opening_lists_no_folder() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk)
    fill(queue, 30)
    for crash in (False, True):
        if not crash:
            queue.close()
        disk = disk.image().restore("strict")
        disk.listdir = None  # type: ignore[assignment, method-assign]
        queue = open_queue(disk)
        assert queue.next_sequence >= 91
        fill(queue, 1)


# -- in a store


def test_in_a_store_appended_messages_are_seen_before_they_are_synced() -> None:
    queue = open_queue(SimulatedDisk(), cut=0)
    queue.append(Messages.of([b"a"]), lsn=4)
    assert payloads(queue) == [b"a"]
    assert (queue.stored_lsn, queue.last_lsn) == (0, 4)


def test_a_store_cuts_the_tail_and_replays_to_the_same_sequences() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk, cut=0)
    journal = [(lsn, [f"{lsn}.{n}".encode().ljust(90, b".") for n in range(3)]) for lsn in range(10, 100, 10)]
    firsts = {}
    for lsn, batch in journal:
        firsts[lsn] = queue.append(Messages.of(batch), lsn=lsn)
        if lsn == 30:
            queue.sync()
    rolled = queue._view.files[0].end_sequence
    assert queue.stored_lsn == 10 * rolled // 3  # the roll synced more than the store was told
    for stored in (0, 30):
        for mode in ("strict", "kept", "torn"):
            again = open_queue(disk.image().restore(mode), cut=stored)
            assert again.stored_lsn == max(stored, queue.stored_lsn)
            for lsn, batch in journal:
                if lsn > again.stored_lsn:
                    assert again.append(Messages.of(batch), lsn=lsn) == firsts[lsn]
            assert payloads(again) == list(itertools.chain.from_iterable(batch for _, batch in journal))


def test_a_poisoned_queue_of_a_store_does_not_show_what_may_be_gone() -> None:
    disk = SimulatedDisk()
    queue = open_queue(disk, cut=0)
    queue.append(Messages.of([b"a"]), lsn=1)
    queue.sync()
    queue.append(Messages.of([b"b"]), lsn=2)
    disk._faults[disk.operations + 1] = "eio"
    with pytest.raises(OSError, match="simulated"):
        queue.sync()
    with pytest.raises(Poisoned):
        queue.read(1)
    queue.recover()
    assert queue.last_lsn == queue.stored_lsn == 1
    assert queue.append(Messages.of([b"b"]), lsn=2) == 2
    assert payloads(queue) == [b"a", b"b"]
