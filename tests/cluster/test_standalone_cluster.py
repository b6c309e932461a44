"""A cluster of processes: this one owns two stores, and there are a Master, two Workers and a driver; all of them see
the folder of one store, and nobody else sees that of the other, which is served over TCP.

The others are in mount namespaces of their own, in which the hidden folder is covered by an empty one. Where the system
does not allow that, it is opened here under a name that leads elsewhere in any other process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from cluster_driver import LOADED
from test_guard import make_certificate, write_tokens

import penstock
from penstock.lsm.collection import CollectionSettings
from penstock.protocol import wire
from penstock.server.gateway import Gateway
from penstock.server.rights import Rights
from penstock.server.tcp import serve_tcp
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

SETTINGS = StoreSettings(offer_bytes_min=1, collection=CollectionSettings(grace_s=0))
SPARK = Path(pyspark.__file__).parent
USERS, EVENTS, DEVICES = 20_000, 6_000, 17
DAEMON_S, DRIVER_S = 90.0, 300.0
COVER = 'mount -t tmpfs none "$0" && exec "$@"'  # the arguments: a folder, a command

pytestmark = pytest.mark.timeout(1_000)  # its own waits end before


# -- processes


@contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Spark's in the folder of its log, which is ended with all of its group."""
    variables |= {
        "SPARK_HOME": str(SPARK),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": f"{log.parent}/spark",
        "SPARK_DAEMON_MEMORY": "256m",
        # They live too briefly for the best code.
        "JAVA_TOOL_OPTIONS": os.environ.get("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
        "TMPDIR": str(log.parent),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """Wait until a process says something."""
    deadline_s = time.monotonic() + DAEMON_S
    while (match := re.search(pattern, log.read_text(errors="replace"))) is None:
        check_alive(process, log, deadline_s)
    return match[1]


def check_alive(process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
    assert process.poll() is None, log.read_text(errors="replace")[-8_000:]
    assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-8_000:]
    time.sleep(0.05)


def covering(folder: Path) -> list[str]:
    """How to begin a command that is to find a folder empty; nothing if that is not allowed here."""
    for way in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        prefix = [*way, "sh", "-c", COVER, str(folder)]
        with suppress(OSError):
            if subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False).returncode == 0:
                return prefix
    return []


@contextmanager
def cluster(folder: Path, prefix: list[str]) -> Iterator[tuple[str, set[int]]]:
    """The Master's address, and the Workers' processes."""

    def start(name: str, kind: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        command = [*prefix, str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        command += ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments]
        log = folder / f"{name}.log"
        return stack.enter_context(running(command, log)), log

    with ExitStack() as stack:
        address = wait_for(*start("master", "master.Master"), r"Starting Spark master at (spark://\S+)")
        options = ["--cores", "1", "--memory", "512m", "--work-dir"]
        names = ["worker-1", "worker-2"]
        workers = [start(name, "worker.Worker", *options, str(folder / name), address) for name in names]
        for worker, log in workers:
            wait_for(worker, log, "(Successfully registered with master)")
        yield address, {worker.pid for worker, _ in workers}


def ancestry(process: int) -> set[int]:
    """A process and those above it."""
    ancestors = set()
    while process:
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:  # it has ended
            break
        ancestors.add(process)
        process = int(stat.rpartition(")")[2].split()[1])
    return ancestors


class Lineage:
    """Remembers who stood above each process: Spark's may have ended by the time that their files are looked at."""

    def __init__(self) -> None:
        self._ancestries: dict[int, set[int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for entry in os.listdir("/proc"):
                if entry.isdigit() and int(entry) not in self._ancestries:
                    self._ancestries[int(entry)] = ancestry(int(entry))

    def of(self, process: int) -> set[int]:
        return self._ancestries.get(process, set())

    def __enter__(self) -> Lineage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)


# -- stores


@dataclass
class Case:
    """A store, and what became of it."""

    name: str
    store: Store
    loaded: Any = None  # the table when the driver had written
    written: dict[str, set[int]] | None = None  # its files then, and by which processes
    compacted: dict[str, set[int]] | None = None
    report: Any = None  # by the driver
    driver: int = 0
    workers: frozenset[int] = frozenset()
    owner_scans: int = 0  # for how many ranges of rows tasks asked the owner
    folder: Path = Path()


def fill(store: Store) -> None:
    users, events = store.kv("users", shards=2), store.queue("events", shards=2)
    users.put_many({b"%06d" % (n * 7_919 % USERS): b"%d" % n * 5 for n in range(USERS)}, durable=True)
    keys = [b"d%02d" % (n % DEVICES) for n in range(EVENTS)]
    events.put_many([b"event %d" % n for n in range(EVENTS)], keys=keys, durable=True)
    for tree, _ in store._maintenance.trees():
        store._maintenance.flush(tree)  # what is in memory is read from the owner, by everybody
    store.kv("loaded")
    store.kv("totals", value="int64")
    store.queue("copied")


def makers(store: Store, name: str, lineage: Lineage) -> dict[str, set[int]]:
    """The files of a table: for each, the process that built it by its own account, and those above that one."""
    info = store.port.table(name)
    assert info is not None
    lineages = {}
    for _, row in store._manifest.scan_chunks(info.table_id):
        if not row.staged:
            with pa.OSFile(f"{store.path}/{row.file_name}") as file:
                maker = pa.ipc.open_file(file).schema.metadata.get(b"penstock.maker", b":0")
            lineages[row.file_name] = lineage.of(int(maker.rpartition(b":")[2]))
    return lineages


@contextmanager
def stores(folder: Path) -> Iterator[tuple[list[Case], list[str]]]:
    """Both stores, and how to begin a command that sees one of them."""
    hidden = folder / "hidden"
    hidden.mkdir()
    prefix = covering(hidden)
    with ExitStack() as stack:
        if not prefix:
            here = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, here)
            hidden = Path(f"/proc/self/fd/{here}/hidden")
        paths = {"shared": folder / "shared", "hidden": hidden}
        cases = [
            Case(name, stack.enter_context(penstock.open(path, settings=SETTINGS))) for name, path in paths.items()
        ]
        for case in cases:
            fill(case.store)
        yield cases, prefix


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    folder, scan_paths = tmp_path_factory.mktemp("cluster"), list[str]()
    begin = Gateway._begin

    def noted(self: Gateway, scan: wire.Scan, rights: Rights) -> None:
        if scan.snapshot:  # of a batch read: streams read what comes from the owner, wherever they are
            scan_paths.append(self._store.path)
        begin(self, scan, rights)

    with pytest.MonkeyPatch.context() as patch, stores(folder) as (case_list, prefix):
        patch.setattr(Gateway, "_begin", noted)
        patch.setattr("penstock.lsm.merge_offers.PART_BYTES_MIN", 1)  # a small compaction, and yet in several parts
        with cluster(folder, prefix) as (address, workers):
            report = drive(folder, prefix, address, case_list)
        for case in case_list:
            case.report, case.driver, case.workers = report[case.name], report["driver"], frozenset(workers)
            case.owner_scans, case.folder = scan_paths.count(case.store.path), folder
        yield {case.name: case for case in case_list}


def drive(folder: Path, prefix: list[str], address: str, cases: list[Case]) -> Any:
    """Run the driver, and compact each store when it asks for work; what it told."""
    certificate, key = make_certificate(folder)
    tokens = write_tokens(folder / "tokens.toml", admin='"*" = "admin"')
    shared, hidden = (case.store for case in cases)
    port = serve_tcp(hidden, certificate=certificate, key=key, tokens=tokens)
    script, log = Path(__file__).with_name("cluster_driver.py"), folder / "driver.log"
    command = [*prefix, sys.executable, str(script), address, str(folder)]
    command += [f"shared={shared.path}", f"hidden=penstock://127.0.0.1:{port}"]
    secrets = {"PENSTOCK_TOKEN": "admin-secret", "PENSTOCK_AUTHORITY": str(certificate)}
    with Lineage() as lineage, running(command, log, **secrets) as driver:
        for case in cases:
            deadline_s = time.monotonic() + DRIVER_S
            while not case.store.offers.slots():
                check_alive(driver, log, deadline_s)
            case.loaded, case.written = case.store.kv("loaded").to_arrow(), makers(case.store, "loaded", lineage)
            case.store.compact("loaded")
            case.compacted = makers(case.store, "loaded", lineage)
        assert driver.wait(DAEMON_S) == 0, log.read_text()[-8_000:]
    return json.loads(log.read_text().splitlines()[-1])


# -- what came of it


@pytest.fixture(params=["shared", "hidden"])
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def check_makers(case: Case, files: dict[str, set[int]] | None, workers: int) -> None:
    """Every file was built below a Worker, of which there are so many: not by the driver, and not here."""
    assert files
    assert all(processes & case.workers for processes in files.values()), files
    assert not any(case.driver in processes for processes in files.values()), files
    assert len(set.union(*files.values()) & case.workers) == workers, files


def test_what_executors_see(case: Case) -> None:
    is_shared = case.name == "shared"
    assert len({executor["executor"] for executor in case.report["executors"]}) == 2
    assert [(executor["files"] > 0, executor["maps"]) for executor in case.report["executors"]] == [
        (is_shared, is_shared)
    ] * 2


def test_a_read(case: Case) -> None:
    for name, order in (("users", ["key"]), ("events", ["shard", "sequence"])):
        expected = case.store.table(name).to_arrow().sort_by([(column, "ascending") for column in order])
        rows = pq.read_table(case.folder / f"{case.name}-{name}.parquet")
        rows = rows.sort_by([(column, "ascending") for column in order])
        assert len(expected) == (USERS if name == "users" else EVENTS)
        assert rows.cast(expected.schema).equals(expected)
    # Who sees the files asks the owner for no row of them, and who does not for all.
    assert (case.owner_scans == 0) == (case.name == "shared")


def test_a_write(case: Case) -> None:
    rows = dict(zip(*(case.loaded.column(name).to_pylist() for name in ("key", "value")), strict=True))
    assert rows == {b"%08d" % n: b"version %d of %040d" % (1 if n % 2 else 2, n) for n in range(LOADED)}
    check_makers(case, case.written, workers=2)


def test_a_stream(case: Case) -> None:
    assert case.report["batches"] >= 1
    assert case.report["rows_in"] == EVENTS
    assert case.store.queue("events").consumer("c").lag == 0
    assert dict(case.store.kv("totals", value="int64").items()) == {
        b"d%02d" % n: len(range(n, EVENTS, DEVICES)) for n in range(DEVICES)
    }
    copied, events = (case.store.queue(name).to_arrow().column("payload").to_pylist() for name in ("copied", "events"))
    assert sorted(copied) == sorted(events)


def test_a_compaction(case: Case) -> None:
    assert case.report["done"] == 1
    assert case.store.kv("loaded").to_arrow().equals(case.loaded)
    assert case.written is not None
    assert case.compacted is not None
    assert len(case.written) == 4
    assert not set(case.written) & set(case.compacted)
    check_makers(case, case.compacted, workers=2)
