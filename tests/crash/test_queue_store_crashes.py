"""Queues of a store against every crash, crashes in recovery and faults; with seeded bugs that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from queue_model import machine_of, open_queues, payloads
from queue_store_scenario import DroppedQueue, QueueStoreScenario, QueueUser, ShortQueueStore
from shared import Patch, SomeRecoveries, seeded

from penstock.host.file_operations import remove_folder
from penstock.partition.ledger_records import Verdict
from penstock.partition.machine import Entry
from penstock.partition.reference import Staging
from penstock.queue.chain import FileChain
from penstock.queue.machine import QueueMachine
from penstock.queue.positions import ACK, CONDITIONS
from penstock.queue.qmft import QmftManifest
from penstock.store.dropped import DroppedShards
from penstock.testing import FakeClock, Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import absent

pytestmark = pytest.mark.usefixtures("quiet")

# Records, rolls, manifests of queues, trims, staged files that are not needed any more, checkpoints.
STEPS = (
    "fdatasync /journal/",
    "create .data",
    "pwrite manifest.current",
    "unlink .data",
    "unlink .arrow",
    "unlink /journal/",
    "commit /manifest",
)


def test_every_crash(monkeypatch: Patch) -> None:
    monkeypatch.setattr("penstock.store.journal_trimming.LEAVE_BYTES", 0)  # closing stores what is cheap to store
    report = explore(QueueStoreScenario(), modes=("strict",), depth=1)
    assert report.missing(*STEPS, "rmdir /tables/") == []
    assert report.crashes > 200


def test_the_scenarios_roll_more_than_once() -> None:
    for scenario in (QueueStoreScenario(), ShortQueueStore()):
        disk = SimulatedDisk()
        disk.on_image = lambda: 0
        scenario.run(disk, History())
        assert sum("create" in image.label and ".data" in image.label for image in disk.images) > 3


def short_crashes() -> None:
    report = explore(ShortQueueStore(), modes=("strict", "torn"), depth=1)
    assert report.missing(*STEPS) == []


def test_every_torn_crash() -> None:
    """The strict ones of this scenario are a campaign; by default `test_every_crash` has those of the longer one."""
    assert explore(ShortQueueStore(), modes=("torn",), depth=1).missing(*STEPS) == []


def test_every_crash_of_the_process_or_with_all_bytes_kept() -> None:
    report = explore(ShortQueueStore(), modes=("kept", "restart"), depth=1, every=3)
    assert report.missing("fdatasync /journal/", "create .data", "commit /manifest") == []
    assert report.crashes > 100


def drops(every: int) -> None:
    report = explore(DroppedQueue(), modes=("torn", "kept"), depth=1, every=every)
    assert report.missing("unlink .data", "unlink .arrow", "rmdir /tables/") == []


def test_crashes_while_a_dropped_queue_is_removed() -> None:
    """Its records are replayed up to the drop, whatever is left of its files."""
    drops(every=3)


def every_drop() -> None:
    drops(every=1)


def test_crashes_in_recovery() -> None:
    report = explore(SomeRecoveries(ShortQueueStore(), 25), modes=("strict",), recovery_modes=("strict",))
    assert report.crashes_in_recovery > 100


def test_faults_crossed_with_crashes() -> None:
    faults = Faults(kinds=("eio", "enospc", "short"), every=37, images_every=53)
    report = explore(ShortQueueStore(), modes=("strict",), depth=1, faults=faults)
    assert report.faults > 20


def test_failed_syncs_of_queue_files() -> None:
    """They are not told to be stored, the journal stays, and another opening has everything."""
    faults = Faults(kinds=("eio",), operations=("fdatasync", "fsync"), every=3, images_every=29)
    report = explore(ShortQueueStore(), modes=("strict",), depth=1, faults=faults)
    assert absent(report.faulted, "fdatasync /journal/", "fdatasync .data", "fsync manifest.") == []


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_fault_and_every_crash_in_recovery() -> None:
    explore(QueueStoreScenario(), depth=1, torn_seeds=3)
    explore(ShortQueueStore())
    every_drop()
    explore(ShortQueueStore(), modes=("strict", "kept"), depth=1, faults=Faults(images_every=9))


def test_a_roll_just_before_a_crash_replays_to_the_same_sequences() -> None:
    """Nothing is stored in the manifest, the files are synced in part: what they hold is not written again."""
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_queues(disk, clock)
    queue = store.queue("a")
    payload_by_sequence = {}
    for number in range(9):
        where = queue.append(b"%d" % number * 600)
        payload_by_sequence[where.sequence] = b"%d" % number * 600
    machine = machine_of(store, "a")
    assert machine.stored == 0
    assert machine.queue.stored_lsn > 0, "it rolled"
    for _ in range(3):  # and again, and again
        disk = disk.image().restore("strict")
        store = open_queues(disk, clock)
        machine = machine_of(store, "a")
        assert {m.sequence: m.payload for m in store.queue("a").read()} == payload_by_sequence
        assert machine.stored == 0
        where = store.queue("a").append(b"more" * 150)
        assert where.sequence == len(payload_by_sequence) + 1
        payload_by_sequence[where.sequence] = b"more" * 150
    store.checkpoint()
    assert machine.stored > 0
    assert payloads(open_queues(disk.image().restore("strict"), clock).queue("a")) == list(payload_by_sequence.values())


# -- seeded bugs


def stored_before_the_files_are_synced(patch: Patch) -> None:
    def unsynced(self: FileChain) -> None:
        if self.active is not None:
            self.synced = self.active.position

    store_now = QueueMachine.store_now

    def pretend(self: QueueMachine) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(FileChain, "sync", unsynced)
            store_now(self)

    patch.setattr(QueueMachine, "store_now", pretend)


def unlinked_before_the_manifest(patch: Patch) -> None:
    def hasty(self: FileChain, count: int) -> None:
        manifest = self._manifest
        for index in range(count):
            path = f"{self._folder}/{manifest.files[index].path}"
            self._fs.unlink(path)
            self._fs.fsync_dir(path.rpartition("/")[0])
        files = manifest.files.without_oldest(count)
        self._write(QmftManifest(manifest.next_sequence, manifest.active_file, files))

    patch.setattr(FileChain, "drop_oldest", hasty)


def acknowledged_without_the_ledger(patch: Patch) -> None:
    """Whoever had the lease when it came in is believed, and nothing is written down."""
    patch.setitem(CONDITIONS, ACK, lambda data, get, put: Verdict.ACCEPTED)


def acknowledged_twice(patch: Patch) -> None:
    """It is written down, but not looked at."""
    judge = CONDITIONS[ACK]

    def lenient(data: bytes, get: Any, put: Any) -> Verdict:
        judge(data, get, put)
        return Verdict.ACCEPTED

    patch.setitem(CONDITIONS, ACK, lenient)


def numbered_again_after_reopening(patch: Patch) -> None:
    """What the files hold already is appended once more, under new sequences."""

    def again(self: QueueMachine, bodies: list[bytes], entry: Entry, following: int, *_: Any) -> None:
        if bodies:
            lsn = max(entry.lsn, self.queue.last_lsn + 1)
            self.queue.append_bodies(bodies, lsn=lsn, time_us=entry.time_us)

    patch.setattr(QueueMachine, "_append", again)


def trims_forgotten_by_a_roll(patch: Patch) -> None:
    """Where the files are is taken for where the machine is, and the floor for that of another LSN."""
    init = QueueMachine.__init__

    def ahead(self: QueueMachine, *args: Any) -> None:
        init(self, *args)
        self._stored = max(self._stored, self.queue.stored_lsn)
        now = self._progress[0]._replace(lsn=self._stored, next=self.queue.next_sequence)
        self._progress = now, now

    patch.setattr(QueueMachine, "__init__", ahead)


def staged_files_given_up_before_their_messages_are_stored(patch: Patch) -> None:
    store_now = QueueMachine.store_now

    def hasty(self: QueueMachine) -> None:
        context, taken = self._context, list(self._taken)
        if taken:
            Staging(context.manifest, fs=context.fs, root=context.root, clock=context.clock).discard(
                self._descriptor.table_id, taken
            )
        store_now(self)

    patch.setattr(QueueMachine, "store_now", hasty)


def files_removed_above_the_floor(patch: Patch) -> None:
    def greedy(self: QueueMachine) -> None:
        with self._lock:
            self.queue.trim(before_sequence=self.next)

    patch.setattr(QueueMachine, "drop_files", greedy)


def dropped_files_removed_under_their_name(patch: Patch) -> None:
    patch.setattr(DroppedShards, "_remove_folder", lambda dropped, folder: remove_folder(dropped._fs, folder))


@pytest.mark.parametrize(
    ("seed_bug", "suite"),
    [
        (stored_before_the_files_are_synced, short_crashes),
        (unlinked_before_the_manifest, short_crashes),
        (acknowledged_without_the_ledger, short_crashes),
        (acknowledged_twice, short_crashes),
        (numbered_again_after_reopening, short_crashes),
        (trims_forgotten_by_a_roll, short_crashes),
        (staged_files_given_up_before_their_messages_are_stored, short_crashes),
        (files_removed_above_the_floor, short_crashes),
        (dropped_files_removed_under_their_name, every_drop),
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[Patch], None], suite: Callable[[], None]) -> None:
    with seeded(seed_bug), pytest.raises(Violation) as caught:
        suite()
    assert "recovery failed: A" not in str(caught.value)  # AttributeError and the like: the bug itself is broken


def test_the_scenario_itself_sees_what_it_should() -> None:
    """A user that is told something else than the store holds is heard."""
    user = QueueUser(SimulatedDisk(), History())
    user.create("a")
    user.put("a", 0, 5)
    user.history.note("put", 99, "a", 0, [b"never written"], None)
    with pytest.raises(Violation):
        user.check()
