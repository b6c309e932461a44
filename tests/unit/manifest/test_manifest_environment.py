"""LMDB itself: growth, limits, damage, forks, panics, dead readers, backups."""

from __future__ import annotations

import fcntl
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from penstock.errors import (
    Backpressure,
    Closed,
    CommitFailed,
    CorruptionError,
    DiskFull,
    ManifestFull,
    NotFound,
    OutcomeUnknown,
    StoreLocked,
)
from penstock.host.files import File
from penstock.host.os_files import OsFileSystem
from penstock.manifest import environment, examine
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.invariants import check_all
from penstock.manifest.keys import ChunkKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import DeleteChunk, ManifestOp, UpsertChunk
from penstock.manifest.pages import MetaPage, read_meta
from penstock.manifest.records import ChunkEntryRecord
from penstock.manifest.settings import ManifestSettings

MIB = 1 << 20


def chunk_op(number: int, detail_bytes: int = 0) -> ManifestOp:
    return UpsertChunk(ChunkKey(1, number), ChunkEntryRecord(f"f{number}", 1, 1, detail=bytes(detail_bytes)))


def chunk_ids(manifest: Manifest) -> list[int]:
    return [key.chunk_id for key, _ in manifest.scan_chunks(1)]


def engine_of(manifest: Manifest) -> LmdbEngine:
    engine = manifest._engine
    assert isinstance(engine, LmdbEngine)
    return engine


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "manifest")


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of which every page was read."""
    paths: list[str] = []
    read_pages = examine._examine

    def look(file: File, meta: MetaPage) -> None:
        paths.append(file.path)
        read_pages(file, meta)

    monkeypatch.setattr(examine, "_examine", look)
    return paths


# -- the map


def test_the_map_grows_under_load_and_stops_at_its_limit(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, map_bytes_max=8 * MIB)
    with Manifest.open(path, settings) as manifest:
        stop, failures = threading.Event(), []

        def read() -> None:
            while not stop.is_set():
                for _ in manifest.scan_chunks(1):
                    pass

        def write(worker: int) -> None:
            try:
                for i in range(60):
                    manifest.apply([chunk_op(worker * 1_000 + i, 8_000)])
            except Exception as error:
                failures.append(error)

        writers = [threading.Thread(target=write, args=(worker,)) for worker in range(1, 9)]
        readers = [threading.Thread(target=read) for _ in range(2)]
        for thread in [*writers, *readers]:
            thread.start()
        for thread in writers:
            thread.join(60)
        stop.set()
        for thread in readers:
            thread.join(60)
        assert failures == []
        assert len(chunk_ids(manifest)) == 480
        assert engine_of(manifest)._map_bytes == 8 * MIB


def test_at_the_limit_reads_and_deletes_go_on_and_free_space(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, map_bytes_max=2 * MIB)
    with Manifest.open(path, settings) as manifest:
        number = fill(manifest, 0)
        for round_ in range(3):
            ids = chunk_ids(manifest)
            assert len(ids) > 100
            for victim in ids[: len(ids) // 2]:  # one commit each, all while it is full
                manifest.apply([DeleteChunk(ChunkKey(1, victim))])
            before = number
            number = fill(manifest, number)
            assert number - before > 50, round_
        assert manifest.read(lambda view: list(check_all(view))) == []
    assert os.path.getsize(path) <= 2 * MIB + environment.DELETE_RESERVE_BYTES


def fill(manifest: Manifest, number: int) -> int:
    """Commit chunks until there is no room; the last number."""
    while True:
        try:
            manifest.apply([chunk_op(number + 1, 6_000)])
        except ManifestFull:
            return number
        number += 1


def test_a_full_manifest_fails_only_the_batches_that_add(path: str) -> None:
    with Manifest.open(path, ManifestSettings(map_bytes=MIB, map_bytes_max=MIB)) as manifest:
        fill(manifest, 0)
        victim = chunk_ids(manifest)[0]
        with pytest.raises(ManifestFull, match="raise map_bytes_max"):
            manifest.apply([DeleteChunk(ChunkKey(1, victim)), *[chunk_op(9_000 + i, 8_000) for i in range(9)]])
        assert chunk_ids(manifest)[0] == victim
        manifest.apply([DeleteChunk(ChunkKey(1, victim))])
        assert chunk_ids(manifest)[0] != victim


def test_the_map_grows_before_its_headroom_is_gone(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, map_bytes_max=64 * MIB)
    with Manifest.open(path, settings) as manifest:
        engine = engine_of(manifest)
        for number in range(1, 300):
            manifest.apply([chunk_op(number, number * 50)])
            assert engine._used_bytes() <= engine._map_bytes * (1 - settings.headroom_ratio)
        assert engine._map_bytes >= 4 * MIB


def test_lmdb_is_seldom_asked_how_full_it_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[LmdbEngine] = []
    used_bytes = LmdbEngine._used_bytes

    def count(engine: LmdbEngine) -> int:
        calls.append(engine)
        return used_bytes(engine)

    monkeypatch.setattr(LmdbEngine, "_used_bytes", count)
    with Manifest.open(path) as manifest:
        for number in range(1, 200):
            manifest.apply([chunk_op(number)])
    assert 1 <= len(calls) <= 1 + 200 // environment.AHEAD_CHECK_COMMITS


def test_the_file_is_written_ahead_of_lmdb_and_stays_sound(path: str) -> None:
    with Manifest.open(path) as manifest:
        for number in range(1, 400):
            manifest.apply([chunk_op(number, 2_000)])
            if number >= environment.AHEAD_CHECK_COMMITS:
                assert os.path.getsize(path) > engine_of(manifest)._used_bytes()
    examine.examine(OsFileSystem(), path)
    with Manifest.open(path) as manifest:
        assert chunk_ids(manifest) == list(range(1, 400))


def test_a_file_that_cannot_be_written_ahead_fails_no_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def full(*_: object) -> int:
        tried.append(1)
        raise DiskFull("no space left: free some")

    monkeypatch.setattr(environment, "claim", full)
    with Manifest.open(path) as manifest:
        for number in range(1, 40):
            manifest.apply([chunk_op(number)])
        assert chunk_ids(manifest) == list(range(1, 40))
    assert tried


def test_a_long_read_holds_up_a_window_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that meet a full map while somebody reads fail together, after one wait."""
    monkeypatch.setattr(environment, "READERS_DRAIN_S", 1.0)
    with Manifest.open(path, ManifestSettings(map_bytes=MIB, map_bytes_max=64 * MIB)) as manifest:
        waits: list[bool] = []
        move = LmdbEngine._resize_map

        def noted(engine: LmdbEngine, size: int, drain_s: float) -> bool:
            waits.append(drain_s == 1.0)
            return move(engine, size, drain_s)

        monkeypatch.setattr(LmdbEngine, "_resize_map", noted)
        errors: list[BaseException] = []

        def commit(number: int) -> None:
            try:
                manifest.apply([chunk_op(number, 600_000)])
            except BaseException as error:
                errors.append(error)

        def read_long(_: object) -> None:
            workers = [threading.Thread(target=commit, args=(number,)) for number in range(1, 9)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(30)

        manifest.read(read_long)
        assert {type(error) for error in errors} == {Backpressure}
        assert sum(waits) <= 3  # those who came alone, and their window
        assert len(chunk_ids(manifest)) == 8 - len(errors)
        commit(20)
        assert 20 in chunk_ids(manifest)


def test_a_commit_that_is_done_is_not_failed_by_what_follows(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when close gave up waiting for it, and took the file away."""
    with Manifest.open(path) as manifest:
        monkeypatch.setattr(LmdbEngine, "_used_bytes", lambda _: None.info())  # type: ignore[attr-defined]
        for number in range(1, 30):
            manifest.apply([chunk_op(number)])
        assert chunk_ids(manifest) == list(range(1, 30))


def test_the_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "manifest").write_bytes(b"not of ours")
    with Manifest.open("manifest") as manifest:
        monkeypatch.chdir(tmp_path / "elsewhere")
        for number in range(1, 100):
            manifest.apply([chunk_op(number, 1_000)])
    assert (tmp_path / "elsewhere" / "manifest").read_bytes() == b"not of ours"
    assert sorted(entry.name for entry in (tmp_path / "elsewhere").iterdir()) == ["manifest"]


def test_a_map_that_grew_is_opened_as_large(path: str) -> None:
    with Manifest.open(path, ManifestSettings(map_bytes=MIB)) as manifest:
        manifest.apply([chunk_op(i, 8_000) for i in range(1, 400)])
    with Manifest.open(path, ManifestSettings(map_bytes=MIB, map_bytes_max=2 * MIB)) as manifest:
        assert len(chunk_ids(manifest)) == 399
        manifest.apply([DeleteChunk(ChunkKey(1, 1))])


def test_a_commit_inside_a_read_does_not_wait_for_itself(path: str) -> None:
    with Manifest.open(path, ManifestSettings(map_bytes=MIB, map_bytes_max=8 * MIB)) as manifest:
        number = manifest.read(lambda _: fill(manifest, 0))  # the map cannot move under this thread's own snapshot
        assert number > 10
        manifest.apply([chunk_op(number + 1, 6_000)])
        assert len(chunk_ids(manifest)) == number + 1


# -- failures of the disk and of processes


def test_a_panic_reopens_the_environment(path: str) -> None:
    """A commit whose meta page cannot be written makes LMDB refuse everything until it is opened anew."""
    with Manifest.open(path) as manifest:
        manifest.apply([chunk_op(1)])
        read_only = os.open(path, os.O_RDONLY)
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd != read_only and _leads_to(fd, path) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC:
                os.dup2(read_only, fd)
        os.close(read_only)
        with pytest.raises(OutcomeUnknown):
            manifest.apply([chunk_op(2)])
        assert chunk_ids(manifest) in ([1], [1, 2])
        generation = manifest.apply([chunk_op(3)]).generation
        assert generation == len(chunk_ids(manifest))
    with Manifest.open(path) as manifest:
        assert {1, 3} <= set(chunk_ids(manifest))
        assert manifest.generation() == generation


def _leads_to(fd: int, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == os.path.realpath(path)
    except OSError:
        return False


def test_a_commit_that_cannot_be_written_changes_nothing(path: str) -> None:
    with Manifest.open(path) as manifest:
        manifest.apply([chunk_op(1)])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path), hard))
        try:
            with pytest.raises(CommitFailed, match="nothing was committed"):
                manifest.apply([chunk_op(i, 4_000) for i in range(2, 200)])
            assert chunk_ids(manifest) == [1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert manifest.apply([chunk_op(2)]).generation == 2
    with Manifest.open(path) as manifest:
        assert chunk_ids(manifest) == [1, 2]
        assert manifest.read(lambda view: list(check_all(view))) == []


def test_readers_that_died_do_not_pin_pages(path: str) -> None:
    with Manifest.open(path) as manifest:
        manifest.apply([chunk_op(1)])
        script = (
            "import lmdb, os, sys, signal\n"
            "env = lmdb.open(sys.argv[1], subdir=False, readonly=True, max_dbs=16)\n"
            "txn = env.begin()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        child = subprocess.run([sys.executable, "-c", script, path], check=False)
        assert child.returncode == -signal.SIGKILL
        env = engine_of(manifest)._env
        assert len(env.readers().splitlines()) >= 2
        engine_of(manifest).maintain()
        assert env.reader_check() == 0


def test_the_timer_tends_the_engine(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tended = threading.Event()
    with Manifest.open(path, ManifestSettings(reader_check_interval_s=0.05)) as manifest:
        monkeypatch.setattr(engine_of(manifest), "maintain", tended.set)
        assert tended.wait(10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused(path: str) -> None:
    with Manifest.open(path) as manifest:
        manifest.apply([chunk_op(1)])
        child = os.fork()
        if child == 0:
            verdict = 1
            try:
                refused = 0
                for call in (
                    lambda: manifest.apply([]),
                    lambda: manifest.get_job(1),
                    lambda: manifest.register_waiter(1, 9, 1.0),
                ):
                    try:
                        call()
                    except Closed as error:
                        refused += "fork" in str(error)
                manifest.close()
                verdict = 0 if refused == 3 else 2
            finally:
                os._exit(verdict)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        manifest.apply([chunk_op(2)])
    with Manifest.open(path) as manifest:
        assert chunk_ids(manifest) == [1, 2]


def test_another_process_cannot_own_it(path: str) -> None:
    with Manifest.open(path):
        with pytest.raises(StoreLocked):
            Manifest.open(path)
        script = "import sys; from penstock.manifest.manifest import Manifest; Manifest.open(sys.argv[1])"
        child = subprocess.run([sys.executable, "-c", script, path], capture_output=True, check=False)
        assert b"StoreLocked" in child.stderr


# -- doubtful files


@pytest.fixture
def filled(path: str) -> str:
    with Manifest.open(path) as manifest:
        for start in range(1, 1_001, 100):
            manifest.apply([chunk_op(i, 100) for i in range(start, start + 100)])
    return path


def test_a_file_that_was_closed_is_not_examined(filled: str, looked: list[str]) -> None:
    Manifest.open(filled).close()
    assert looked == []


@pytest.mark.parametrize("note", [b"", b"open", b"half a stamp"])
def test_a_file_that_nobody_closed_is_examined_once(filled: str, looked: list[str], note: bytes) -> None:
    Path(filled + ".owner").write_bytes(note)
    Manifest.open(filled).close()
    assert looked == [filled]
    Manifest.open(filled).close()
    assert looked == [filled]


def test_a_killed_owner_leaves_a_file_to_be_examined(path: str, looked: list[str]) -> None:
    script = (
        "import os, signal, sys; from penstock.manifest.manifest import Manifest\n"
        "manifest = Manifest.open(sys.argv[1]); manifest.reserve_job_id(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", script, path], check=False)
    assert child.returncode == -signal.SIGKILL
    with Manifest.open(path) as manifest:
        assert looked == [path]
        assert manifest.reserve_job_id() == 65


def test_one_flipped_bit_of_a_closed_file_is_found(filled: str) -> None:
    content = Path(filled).read_bytes()
    file = OsFileSystem().open(filled)
    used = read_meta(file).used_bytes
    file.close()
    for at in [*random.Random(3).sample(range(used), 60), 0, used - 1]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        Path(filled).write_bytes(damaged)
        with pytest.raises(CorruptionError, match=re.escape(filled)):
            Manifest.open(filled)
    Path(filled).write_bytes(content)
    Manifest.open(filled).close()


def test_an_older_copy_is_found(filled: str) -> None:
    older = Path(filled).read_bytes()
    with Manifest.open(filled) as manifest:
        manifest.apply([chunk_op(2_001)])
    Path(filled).write_bytes(older)
    with pytest.raises(CorruptionError, match="older copy"):
        Manifest.open(filled)


def test_an_older_stamp_is_not_believed(filled: str, looked: list[str]) -> None:
    older = Path(filled + ".owner").read_bytes()
    with Manifest.open(filled) as manifest:
        manifest.apply([chunk_op(2_001)])
    Path(filled + ".owner").write_bytes(older)
    with Manifest.open(filled) as manifest:
        assert len(chunk_ids(manifest)) == 1_001
    assert looked == [filled]


def test_damage_behind_sound_meta_pages_is_found(filled: str) -> None:
    content = bytearray(Path(filled).read_bytes())
    content[2 * 4096 :] = b"\xa5" * (len(content) - 2 * 4096)
    Path(filled).write_bytes(content)
    for note in (b"open", Path(filled + ".owner").read_bytes()):
        Path(filled + ".owner").write_bytes(note)
        with pytest.raises(CorruptionError, match="restore this file"):
            Manifest.open(filled)


@pytest.mark.parametrize("damage", ["short", "empty", "meta", "page size", "tiny"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_file_that_looks_wrong_is_corrupt(filled: str, damage: str, closed: bool) -> None:
    content = bytearray(Path(filled).read_bytes())
    if damage == "short":
        del content[3 * 4096 :]
    elif damage == "empty":
        content.clear()
    elif damage == "tiny":
        del content[100:]
    elif damage == "meta":
        content[16:20] = content[4096 + 16 : 4096 + 20] = b"junk"
    else:
        content[40:44] = b"\1\2\3\4"
    Path(filled).write_bytes(content)
    if not closed:
        Path(filled + ".owner").write_bytes(b"open")
    with pytest.raises(CorruptionError, match=re.escape(filled)):
        Manifest.open(filled)


def test_a_broken_rule_is_found_by_the_examination(filled: str) -> None:
    env = lmdb.open(filled, subdir=False, max_dbs=16)
    with env.begin(write=True) as txn:
        txn.delete(b"f7", db=env.open_db(b"chunk_files", txn=txn))
    env.close()
    with pytest.raises(CorruptionError, match="f7"):
        Manifest.open(filled)


def test_a_stamp_that_cannot_be_written_fails_no_close(
    filled: str, monkeypatch: pytest.MonkeyPatch, looked: list[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "no")

    manifest = Manifest.open(filled)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_write_note", fails)
        manifest.close()
    Manifest.open(filled).close()
    assert looked == [filled]


# -- backups


def test_backups_rotate_and_restore_takes_the_newest_sound_one(filled: str) -> None:
    with Manifest.open(filled) as manifest:
        manifest.backup()
        manifest.apply([chunk_op(2_001)])
        manifest.backup()
        manifest.apply([chunk_op(2_002)])
        newest = manifest.backup()
        manifest.apply([chunk_op(2_003)])
        with pytest.raises(StoreLocked):
            Manifest.restore(filled)
    names = sorted(name for name in os.listdir(os.path.dirname(filled)) if "backup" in name)
    assert names == ["manifest.backup-1", "manifest.backup-2"]
    Path(filled).write_bytes(b"ruined")
    with pytest.raises(CorruptionError):
        Manifest.open(filled)
    assert Manifest.restore(filled) == newest
    with Manifest.open(filled) as manifest:
        assert chunk_ids(manifest)[-1] == 2_002
        assert manifest.read(lambda view: list(check_all(view))) == []
    assert Path(filled + ".damaged").read_bytes() == b"ruined"
    Path(newest).write_bytes(b"ruined too")
    assert Manifest.restore(filled).endswith("backup-2")
    with Manifest.open(filled) as manifest:
        assert chunk_ids(manifest)[-1] == 2_001


def test_a_lost_file_is_not_taken_for_a_new_store(filled: str) -> None:
    with Manifest.open(filled) as manifest:
        manifest.backup()
    os.unlink(filled)
    with pytest.raises(CorruptionError, match="the file is missing"):
        Manifest.open(filled)
    Manifest.restore(filled)
    with Manifest.open(filled) as manifest:
        assert len(chunk_ids(manifest)) == 1_000


def test_a_lost_file_without_a_backup_is_not_taken_for_a_new_store(filled: str) -> None:
    os.unlink(filled)
    with pytest.raises(CorruptionError, match="the file is missing"):
        Manifest.open(filled)


def test_nothing_to_restore_from(filled: str) -> None:
    with pytest.raises(NotFound, match="no valid backup"):
        Manifest.restore(filled)


def test_a_half_made_file_is_made_again(path: str) -> None:
    Path(path + ".new").write_bytes(b"half")
    with Manifest.open(path) as manifest:
        manifest.apply([chunk_op(1)])
    assert not os.path.exists(path + ".new")
