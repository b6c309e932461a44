"""`penstock.open(path, read_only=True)`: everything durable is read, nothing on disk changes, writes are refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import Closed, CorruptionError, Invalid, NotFound, ReadOnly, StoreLocked
from penstock.host.files import File
from penstock.host.os_files import OsFileSystem

WRITES: dict[str, Callable[[Any], Any]] = {
    "create": lambda store: store.kv("new"),
    "put": lambda store: store.kv("users").put(b"k", b"v"),
    "put_many": lambda store: store.kv("users").put_many({b"k": b"v"}),
    "delete": lambda store: store.kv("users").delete(b"a"),
    "merge": lambda store: store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True),
    "message": lambda store: store.queue("events").put(b"m"),
    "append": lambda store: store.queue("events").append(b"m"),
    "trim": lambda store: store.queue("events").trim(2),
    "alter": lambda store: store.queue("events").alter(retention=penstock.Retention(age_s=1)),
    "get": lambda store: store.queue("events").consumer("new").get(),
    "seek": lambda store: store.queue("events").consumer("c").seek(1),
    "drop": lambda store: store.drop("users"),
    "load": lambda store: store.load("users", pa.table({"key": [b"k"], "value": [b"v"]})),
    "stage": lambda store: store.stage("users"),
    "prepare": lambda store: store.prepare("users", pa.table({"key": [b"k"], "value": [b"v"]})),
    "batch": lambda store: store.batch(),
    "flush": lambda store: store.flush(),
    "token": lambda store: store.queue("events").put(b"m", token=("p", 1)),
    "checkpoint": lambda store: store.checkpoint(),
    "compact": lambda store: store.compact("users"),
    "resume": lambda store: store.resume("users"),
    "recover": lambda store: store.recover(),
}


def fill(store: Any, number: int) -> None:
    store.kv("users").put_many({b"%d.%d" % (number, n): b"x" * 100 for n in range(200)})
    store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64")
    store.queue("events", shards=2).put_many([b"%d.%d" % (number, n) for n in range(100)], durable=True)
    store.flush()


def content(store: Any) -> dict[str, Any]:
    rows = {name: store.table(name).to_arrow().to_pylist() for name in store.tables()}
    return {**rows, "counts": store.kv("counts", value="int64")[b"n"], "consumers": positions(store)}


def positions(store: Any) -> Any:
    return [(each.name, each.position, each.lag) for each in store.queue("events").consumers()]


def tree(folder: Path) -> dict[str, Any]:
    """Everything that a write could change: names, bytes, and times of changes."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            path.lstat().st_ctime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with penstock.open(path) as store:
        fill(store, 1)
        consumer = store.queue("events").consumer("c")
        consumer.ack(consumer.get(5))
        store.compact("users")
    return path


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A store whose owner was killed: the end of its journal is applied nowhere else."""
    path = tmp_path / "crashed"
    program = textwrap.dedent(
        f"""
        import os, sys
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        import penstock
        from test_store_read_only import fill
        with penstock.open({str(path)!r}) as store:
            fill(store, 1)
        store = penstock.open({str(path)!r})
        for number in range(2, 5):
            fill(store, number)
            consumer = store.queue("events").consumer("c")
            consumer.ack(consumer.get(5))
        store.kv("made_late").put(b"k", b"v", durable=True)
        store.queue("events").trim(3, durable=True)
        os.kill(os.getpid(), 9)
        """
    )
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    return path


class NoWrites(OsFileSystem):
    """A file system that takes no change: what a read-only mount does, in every call."""

    def _refuse(self, *arguments: Any, **_: Any) -> Any:
        raise AssertionError(f"a read-only store changes {arguments}")

    create = rename = unlink = mkdir = rmdir = fsync_dir = folder = lock = _refuse

    def open(self, path: str, *, write: bool = False) -> File:
        assert not write, f"a read-only store writes {path}"
        return super().open(path)


def test_a_closed_store(folder: Path) -> None:
    before = tree(folder)
    with penstock.open(folder, read_only=True) as store:
        read = content(store)
        assert store.kv("users").get(b"1.7") == b"x" * 100
        with store.snapshot() as snapshot:
            assert snapshot.queue("events").to_arrow().num_rows == 100
    assert tree(folder) == before
    with penstock.open(folder, read_only=True, fs=NoWrites()) as store:
        assert content(store) == read
    assert tree(folder) == before
    with penstock.open(folder) as store:
        assert content(store) == read


def test_a_store_whose_owner_was_killed(crashed: Path) -> None:
    path, before = crashed, tree(crashed)
    for _ in range(2):  # the first leaves nothing for the second
        with penstock.open(path, read_only=True, fs=NoWrites()) as store:
            read = content(store)
            assert store.tables() == ["counts", "events", "made_late", "users"]
            assert store.kv("counts", value="int64")[b"n"] == 4
            assert store.kv("users").get(b"4.199") == b"x" * 100
            assert store.troubles() == []
        assert tree(path) == before
    with penstock.open(path) as store:
        assert content(store) == read, "recovery as an owner finds the same"


def test_writes_are_refused(folder: Path) -> None:
    before = tree(folder)
    with penstock.open(folder, read_only=True) as store:
        read = content(store)
        for name, write in WRITES.items():
            with pytest.raises(ReadOnly, match="read_only=True") as caught:
                write(store)
            assert "\n" not in str(caught.value), name
        assert content(store) == read
    assert tree(folder) == before
    with pytest.raises(Closed):
        store.kv("users")


def test_a_write_that_is_taken_would_be_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the refusal a write is taken, and is gone when the store is closed."""
    monkeypatch.setattr("penstock.store.port.LocalPort.refuse_changes", lambda *_: None)
    with penstock.open(folder, read_only=True) as store:
        WRITES["put"](store)


def test_one_owner_or_readers(folder: Path) -> None:
    with penstock.open(folder) as owner:
        with pytest.raises(StoreLocked, match="open in this process"):
            penstock.open(folder, read_only=True)
        with pytest.raises(StoreLocked, match="open in this process"):
            penstock.open(folder)
        owner.kv("users").put(b"k", b"v", durable=True)
    with penstock.open(folder, read_only=True) as first, penstock.open(folder, read_only=True) as second:
        assert first.kv("users").get(b"k") == second.kv("users").get(b"k") == b"v"
        with pytest.raises(StoreLocked, match="open read-only .* in process this one: close it there first"):
            penstock.open(folder)
    penstock.open(folder).close()


def test_a_reader_in_another_process_is_named(folder: Path) -> None:
    """At once, and by its process id: nobody can open the store before that reader has closed it."""
    program = f"import penstock; s = penstock.open({str(folder)!r}, read_only=True); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        for act in (penstock.open, penstock.connect):
            with pytest.raises(StoreLocked) as caught:
                act(folder)
            assert str(caught.value) == (
                f"{folder} is open read-only (read_only=True) in process {reader.pid}: close it there first"
            )
        reader.communicate(b"\n", timeout=30)
    with penstock.connect(folder) as client:
        assert client.tables()


def test_an_owner_in_another_process(folder: Path) -> None:
    program = f"import penstock; s = penstock.open({str(folder)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(StoreLocked, match=r"another process: use penstock\.connect"):
            penstock.open(folder, read_only=True)
        owner.communicate(b"\n", timeout=30)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take away its own rights")
def test_a_folder_without_write_permission(folder: Path) -> None:
    """As a user who may read everything and write nothing."""
    with tempfile.TemporaryDirectory() as reachable:  # other users cannot enter the folders of tests
        copy = Path(reachable) / "store"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("bell", "f-*", "control"))
        for path in [Path(reachable), copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        code = f"""
import os, sys, penstock
def read():
    with penstock.open({str(copy)!r}, read_only=True) as store:
        return len(store.kv("users").to_arrow()), store.queue("events").to_arrow().num_rows
read()  # all that it needs is imported by now
os.setgid(65534)
os.setuid(65534)
try:
    open({str(copy / "LOCK")!r}, "r+")
except PermissionError:
    print(*read())
"""
        before = tree(copy)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split() == ["200", "100"], done.stderr
        assert tree(copy) == before


def test_a_read_only_mount(folder: Path, tmp_path: Path) -> None:
    """In a namespace of its own, where this user may mount."""
    code = f"""
import sys, penstock
try:
    open({str(tmp_path / "mounted" / "probe")!r}, "w")
except OSError:
    pass
else:
    sys.exit("it can be written")
with penstock.open({str(tmp_path / "mounted")!r}, read_only=True) as store:
    print(len(store.kv("users").to_arrow()), store.queue("events").to_arrow().num_rows)
try:
    penstock.open({str(tmp_path / "mounted")!r})
except penstock.errors.PenstockError as error:
    print("read_only=True" in str(error))
"""
    (tmp_path / "mounted").mkdir()
    (tmp_path / "code.py").write_text(code)
    mount = f"mount --bind {folder} {tmp_path}/mounted && mount -o remount,ro,bind {tmp_path}/mounted"
    may_mount = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    if may_mount.returncode:
        pytest.skip("this user may not mount")
    command = ["unshare", "-m", "sh", "-c", f"{mount} && {sys.executable} {tmp_path}/code.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["200", "100", "True"], done.stderr


def test_what_is_not_a_store(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(NotFound, match="no store"):
            penstock.open(path, read_only=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Invalid):
        penstock.open(tmp_path, read_only="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["manifest", "journal"])
def test_damage_is_found_as_by_an_owner(folder: Path, name: str) -> None:
    path = folder / name
    if path.is_file():
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    else:
        for segment in path.iterdir():
            segment.unlink()
    with pytest.raises(CorruptionError):
        penstock.open(folder, read_only=True)
    with pytest.raises(CorruptionError):
        penstock.open(folder)
