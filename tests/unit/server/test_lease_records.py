"""The record of a lease is a write to the manifest: reads continue when it fails, hangs or is interrupted."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from interrupts import every_point, where
from store_model import SETTINGS, open_simulated

import penstock
from penstock.errors import CommitFailed, DiskFull, ManifestFull, OutcomeUnknown
from penstock.host.files import Buffer
from penstock.host.os_files import OsFile, OsFileSystem
from penstock.kinds import partitions_of
from penstock.lsm import readers
from penstock.lsm.readers import READERS_KEY, LeaseRecord, _decode
from penstock.lsm.tasks import CLEAN_UP
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import CommitReceipt, ManifestOp, PutWalState
from penstock.server import gateway, service
from penstock.server.flight import FlightGateway
from penstock.server.leased_objects import LeasedObjects
from penstock.server.query_names import QueryNames
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.members import await_true

ERRORS = [
    DiskFull("the disk is full"),
    CommitFailed("nothing was committed"),
    ManifestFull("it is at its limit"),
    OutcomeUnknown("check if it happened"),
    OSError(errno.EIO, "Input/output error"),
]


class Records:
    """Lets the records of leases fail, or wait, and no other commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.may_go = threading.Event()
        self.may_go.set()
        self.tried = 0
        apply = Manifest.apply

        def apply_or_fail(
            manifest: Manifest,
            operations: list[ManifestOp],
            *,
            generation_hint: int | None = None,
            timeout_s: float = 30.0,
        ) -> CommitReceipt:
            if any(isinstance(one, PutWalState) and one.key == READERS_KEY for one in operations):
                self.tried += 1
                assert self.may_go.wait(60)
                if self.error is not None:
                    raise self.error
            return apply(manifest, operations, generation_hint=generation_hint, timeout_s=timeout_s)

        monkeypatch.setattr(Manifest, "apply", apply_or_fail)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    return Records(monkeypatch)


def recorded(store: Store) -> LeaseRecord:
    row = store._manifest.get_wal_state(READERS_KEY)
    return LeaseRecord() if row is None else _decode(row.detail)


def expire_record(store: Store) -> None:
    """Let the record end as if it had not been extended for long."""
    store.readers._record = LeaseRecord()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_reads_of_snapshots_continue_when_leases_cannot_be_recorded(
    tmp_path: Path, records: Records, error: Exception
) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        store.kv("t").put_many({b"%d" % n: b"v" for n in range(500)}, durable=True)
        for tree, _ in store._maintenance.trees():
            store._maintenance.flush(tree)
        info = store.port.table("t")
        assert info is not None
        partition = partitions_of(info)[0]
        with client.snapshot(lease_s=500.0) as early:
            assert any(piece.detail for piece in early.port.pieces(partition, 1))
            records.error = error
            expire_record(store)
            with client.snapshot(lease_s=500.0) as late:
                for snapshot in (early, late):
                    assert snapshot.kv("t").get(b"7") == b"v"
                    assert len(list(snapshot.kv("t").scan())) == 500
                    assert len(list(client.snapshot(snapshot.id).kv("t").scan())) == 500
                    pieces = snapshot.port.pieces(partition, 1)
                    assert not any(piece.detail for piece in pieces), "it would learn names without a record"
                    assert sum(batch.num_rows for piece in pieces for batch in snapshot.read(piece)) == 500
                records.error = None
                await_true(lambda: store.readers.expect(400.0))
                assert recorded(store).longest_s > 400.0
                assert any(piece.detail for piece in early.port.pieces(partition, 1))


def test_a_failing_record_is_not_tried_for_each_read(tmp_path: Path, records: Records) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        table = store.kv("t")
        table.put(b"k", b"v", durable=True)
        records.error = DiskFull("the disk is full")
        with client.snapshot(lease_s=500.0) as snapshot:
            begin_s, tried = time.monotonic(), records.tried
            for _ in range(200):
                assert snapshot.kv("t").get(b"k") == b"v"
            assert records.tried - tried <= 2 + 3 * (time.monotonic() - begin_s)


def test_reads_do_not_wait_for_a_record_that_hangs(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "WAIT_S", 0.2)
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        table = store.kv("t")
        table.put(b"k", b"v", durable=True)
        with client.snapshot(lease_s=500.0) as snapshot:
            records.may_go.clear()
            hanging = threading.Thread(target=store.readers.expect, args=(600.0,))
            hanging.start()
            try:
                assert snapshot.kv("t").get(b"k") == b"v"  # its lease is recorded
                expire_record(store)
                begin_s = time.monotonic()
                assert snapshot.kv("t").get(b"k") == b"v"
                assert time.monotonic() - begin_s < 10
            finally:
                records.may_go.set()
                hanging.join()


def test_leases_end_although_their_record_fails(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAINTAIN_S", 0.05)
    monkeypatch.setattr(gateway, "FORGET_S", 0.0)
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        client.snapshot(lease_s=0.5)
        owner = service.service_of(store)
        assert owner is not None
        snapshots = owner.gateway()._snapshots
        records.error = OSError(errno.EIO, "Input/output error")
        tried = records.tried
        await_true(lambda: len(snapshots) == 0 and records.tried > tried)
        records.error = None
        await_true(lambda: recorded(store) == LeaseRecord())


def test_a_record_that_may_have_been_committed_is_removed_when_no_lease_is_left(records: Records) -> None:
    with open_simulated(SimulatedDisk(), FakeClock(), SETTINGS) as store:
        commit = store.readers._commit

        def commit_late(record: LeaseRecord) -> None:
            commit(record)
            store.readers._record, store.readers._is_sure = LeaseRecord(), False
            raise OutcomeUnknown("check if it happened")

        store.readers._commit = commit_late  # type: ignore[method-assign]
        assert not store.readers.expect(500.0)
        store.readers._commit = commit  # type: ignore[method-assign]
        assert recorded(store).longest_s == 500.0
        store.readers.keep(lambda: 0.0)
        assert recorded(store) == LeaseRecord()


def test_a_closing_owner_removes_no_file_of_a_reader_whose_lease_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pins of its readers end at the close, and their leases later: the clean-up may run in between."""
    shutdown = FlightGateway.shutdown

    def shut_down_slowly(server: FlightGateway) -> None:
        time.sleep(1.0)  # as long as a suspended client holds its call
        shutdown(server)

    monkeypatch.setattr(FlightGateway, "shutdown", shut_down_slowly)
    root, settings = tmp_path / "store", StoreSettings(task_intervals_s={CLEAN_UP: 0.05})
    with penstock.open(root, settings=settings) as store:
        client = penstock.connect(root)
        table = store.kv("t")
        for number in range(3):
            table.put_many({b"%d %d" % (number, n): b"v" for n in range(100)}, durable=True)
            for tree, _ in store._maintenance.trees():
                store._maintenance.flush(tree)
        client.snapshot(lease_s=500.0)
        before = set(root.glob("tables/*/*/*.sst"))
        store.compact("t", timeout_s=60)
        time.sleep(0.5)
        assert before <= set(root.glob("tables/*/*/*.sst")), "its snapshot holds them"
    assert before <= set(root.glob("tables/*/*/*.sst")), "its lease does"
    client.close()


def test_an_interrupt_at_any_line_leaves_no_hold_and_no_lease_in_use() -> None:
    clock = FakeClock()
    with open_simulated(SimulatedDisk(), clock, SETTINGS) as store:
        leases, fs = store.readers, OsFileSystem()
        objects: LeasedObjects[int] = LeasedObjects(
            lambda _: None, noun="snapshot", clock=clock, count_max=9, each_max=9, renew=leases.expect
        )
        objects.add("a", 1, client="a", lease_s=50.0)
        assert leases.expect(500.0)

        def hold() -> None:
            with leases.holding(fs):
                pass

        def grant() -> None:
            with leases.granting(50.0):
                pass

        def use() -> None:
            with objects.use("a"):
                pass

        for act in (hold, grant, use):
            for _ in every_point(act):
                assert (leases.holders, leases._granting, objects._entries["a"].users) == (0, 0, 0), where[-1]
        objects.close("a", "a")
        assert not len(objects)


def test_a_use_that_begins_while_the_record_becomes_shorter_is_recorded() -> None:
    with open_simulated(SimulatedDisk(), FakeClock(), SETTINGS) as store:
        leases, left, done = store.readers, threading.Event(), threading.Event()
        leases.expect(500.0)

        def left_s() -> float:
            left.set()
            done.wait(0.5)  # the use must wait for the shorter record, so this ends by its time
            return 0.0

        keeping = threading.Thread(target=leases.keep, args=(left_s,))
        keeping.start()
        assert left.wait(10)
        assert leases.expect(400.0)
        done.set()
        keeping.join()
        assert recorded(store).longest_s == 400.0


# -- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB, where this process may mount a file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    """Take every block of a disk, as another program would."""
    with suppress(OSError), (disk / "others").open("ab", buffering=0) as others:
        while True:
            others.write(bytes(4_096))


def test_every_read_of_clients_continues_on_a_full_disk(small_disk: Path) -> None:
    root, settings = small_disk / "store", StoreSettings(reserve_bytes=1 << 20)
    with penstock.open(root, settings=settings) as store, penstock.connect(root):
        store.kv("t").put_many({b"%d" % n: b"v" for n in range(500)}, durable=True)
    (small_disk / "others").touch()
    for reopened in (False, True):
        with penstock.open(root, settings=settings) as store, penstock.connect(root) as client:
            fill(small_disk)
            for number in range(100):
                expire_record(store)
                query = client.query_snapshot(f"{reopened} {number}", lease_s=300.0)
                with client.snapshot() as snapshot:
                    for one in (client, query, snapshot):
                        assert one.kv("t").get(b"7") == b"v"
                assert len(list(query.kv("t").scan())) == 500


def test_names_of_queries_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is space for some hundreds; then no query begins, because a second owner would not know of it."""

    def write_over(file: OsFile, data: Buffer, offset: int) -> None:
        if offset + len(data) > file.size():
            raise OSError(errno.ENOSPC, "No space left on device", file.path)
        pwrite(file, data, offset)

    fs, path, pwrite = OsFileSystem(), str(tmp_path / "run" / "queries"), OsFile.pwrite
    QueryNames(fs, path, FakeClock()).close()
    monkeypatch.setattr(OsFile, "pwrite", write_over)
    used: list[str] = []
    names = QueryNames(fs, path, FakeClock())
    with pytest.raises(DiskFull, match="run/queries has no room"):
        for number in range(10_000):
            assert names.use(f"query {number}")
            used.append(f"query {number}")
    assert len(used) > 600
    for _ in range(2):
        assert not any(map(names.use, used))
        with pytest.raises(DiskFull):
            names.use("another")
        names.close()
        names = QueryNames(fs, path, FakeClock())
    monkeypatch.undo()
    assert names.use("another")
    names.close()
