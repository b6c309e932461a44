"""Every command on a store that is open here, served, closed, empty and damaged; its JSON has its fields."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from commands import Ended
from commands import penstock as run
from json_shapes import Data, Moment, Natural, Shape, mismatch
from rich.cells import cell_len

import penstock
from penstock.cli.app import commands_below
from penstock.cli.certificates import make_certificates
from penstock.cli.output import cut
from penstock.cli.program import app
from penstock.errors import Closed
from penstock.store.store import Store
from penstock.testing.members import free_ports

TROUBLE: Shape = {"table": str, "shard": Natural, "lsn": Natural, "reason": str}
DAMAGE: Shape = {"path": str, "reason": str}
HEALTH: Shape = {"well": bool, "troubles": [TROUBLE], "damage": [DAMAGE]}
PAGE: Shape = {
    "store": str, "well": bool, "state": str, "error": str, "incarnation": Natural, "last_epoch": Natural,
    "durable_epoch": Natural, "applied_epoch": Natural, "first_lsn": Natural, "needed_from": Natural,
    "durable_lsn": Natural, "applied_lsn": Natural, "global_applied_floor": Natural, "writes": Natural,
    "written_bytes": Natural, "pending_bytes": Natural, "in_flight_bytes": Natural, "waiting_writes": Natural,
    "refused_writes": Natural, "flushes": Natural, "flush_failures": Natural, "apply_failures": Natural,
    "required_from": Natural, "member": str, "acknowledged": dict[str, Natural],
    "tables": [
        {
            "table": str, "kind": str, "shards": Natural, "rows": Natural | None, "bytes": Natural | None,
            "behind": Natural, "state": str, "error": str,
        }
    ],
    "consumers": [
        {
            "queue": str, "consumer": str, "lag": Natural, "leased": Natural, "seen": Moment | None,
            "rows_in": Natural | None, "rows_out": Natural | None, "duplicates": Natural | None,
        }
    ],
    "troubles": [str],
}  # fmt: skip
TABLE: Shape = {"table": str, "kind": str, "shards": Natural}
DESCRIPTION: Shape = {
    **TABLE, "id": Natural, "encrypted": bool, "compression": str, "column key": str, "column value": str,
    "column lsn": str,
    "rows_max": Natural, "memory_bytes": Natural, "files": Natural, "file_bytes": Natural, "runs_max": Natural,
    "shard 0": str,
}  # fmt: skip
MESSAGE: Shape = {"shard": Natural, "sequence": Natural, "time": Moment, "key": Data | None, "payload": Data}
CONSUMER: Shape = {
    "consumer": str, "mode": str, "lag": Natural, "leased": Natural, "positions": dict[str, Natural],
    "seen": Moment | None, **dict.fromkeys(["batches", "rows_in", "rows_out", "dead", "duplicates"], Natural | None),
}  # fmt: skip
SAMPLE: Shape = {"metric": str, "labels": dict[str, str], "time": Moment, "value": float}
JOB: Shape = {
    "job": Natural, "kind": str, "table": str, "state": str, "attempts": Natural, "created": Moment,
    "finished": Moment | None, "error": str,
}  # fmt: skip
CHUNK: Shape = {
    "table": str, "shard": Natural, "level": Natural, "chunk": Natural, "rows": Natural, "size_bytes": Natural,
    "deletes": Natural, "lsn_min": Natural, "lsn_max": Natural, "residency": str, "object": str,
}  # fmt: skip
BACKUP: Shape = {
    "number": Natural, "lsn": Natural, "files": Natural, "bytes": Natural, "files_copied": Natural,
    "bytes_copied": Natural,
}  # fmt: skip

# Each command with its arguments after STORE, and the shape of its JSON; None: it prints none.
ON_A_STORE: dict[tuple[str, ...], tuple[list[str], Shape]] = {
    ("status",): ([], PAGE),
    ("top",): (["--count", "1"], PAGE),
    ("table", "list"): ([], TABLE),
    ("table", "create"): (["more", "kv", "--value", "int64"], TABLE),
    ("table", "describe"): (["users"], DESCRIPTION),
    ("table", "compact"): (
        ["users"],
        {
            "table": str,
            "shards": Natural,
            "merged": Natural,
            "files_before": Natural,
            "files_after": Natural,
            "bytes_before": Natural,
            "bytes_after": Natural,
        },
    ),
    ("table", "drop"): (["spare", "--yes"], {"table": str}),
    ("put",): (["users", "bob", "1"], {"table": str, "key": Data}),
    ("get",): (["users", "ada"], {"value": dict[str, list[int] | str]}),
    ("scan",): (["users"], {"key": Data, "value": int | dict[str, list[int] | str]}),
    ("delete",): (["users", "bob"], {"table": str, "key": Data}),
    ("queue", "put"): (["events", "hello"], {"shard": Natural, "sequence": Natural, "lsn": Natural}),
    ("queue", "tail"): (["events"], MESSAGE),
    ("queue", "dump"): (["events"], MESSAGE),
    ("queue", "consumers"): (["events"], CONSUMER),
    ("queue", "seek"): (["events", "worker", "earliest"], {"consumer": str, "position": dict[str, Natural]}),
    ("consumers",): ([], {"queue": str, **CONSUMER}),
    ("series", "write"): (
        ["metrics", 'cpu{host="b"}', "0.5"],
        {"metric": str, "labels": dict[str, str], "value": float},
    ),
    ("series", "select"): (["metrics", "cpu"], SAMPLE),
    ("series", "query"): (["metrics", "cpu", "--last", "60"], SAMPLE),
    ("vector", "upsert"): (["docs", "b", "[0, 1]", "--attributes", '{"lang": "de"}'], {"table": str, "id": str}),
    ("vector", "search"): (["docs", "[1, 0]"], {"id": str, "distance": float, "attributes": dict[str, str]}),
    ("resume",): (["users"], HEALTH),
    ("keep-snapshot",): (["users"], {"table": str, "lsns": [Natural]}),
    ("repair",): (["users"], HEALTH),
    ("recover",): ([], {"recovered": bool}),
    ("jobs", "list"): ([], JOB),
    ("jobs", "run"): (["users"], {"table": str, "compactions": Natural}),
    ("chunks", "list"): (["users"], CHUNK),
    ("chunks", "verify"): (["users"], {"well": bool, "chunks": Natural, "damage": [DAMAGE]}),
    ("check",): ([], HEALTH),
    ("backup",): (["BACKUPS"], BACKUP),
    ("metrics",): ([], None),
}
ELSEWHERE = {  # what these do is tested in the files named
    ("init",), ("restore",), ("salvage",), ("bench",), ("config", "show"), ("token", "new"),  # below
    ("jobs", "show"), ("jobs", "retry"),  # below
    ("chunks", "archive"), ("chunks", "verify-archive"), ("chunks", "evict"), ("chunks", "rehydrate"),
    ("chunks", "collect"), ("reattach",),  # test_archive_commands
    ("serve",), ("http",), ("certificates",), ("console",),  # test_cli_http, test_cli_certificates, tests/unit/server
    ("cluster", "init"), ("cluster", "run"), ("cluster", "status"), ("cluster", "certs"),
    ("cluster", "replace"),  # test_cluster
    ("keys", "new"), ("keys", "rotate"),  # tests/unit/test_encryption
}  # fmt: skip


def fill(store: Store | penstock.RemoteStore) -> None:
    store.kv("users", value="json").put(b"ada", {"born": [1815], "note": "[/x] [error]"}, durable=True)
    store.kv("spare")
    store.queue("events").put(b"first", durable=True)
    store.queue("events").consumer("worker").get()
    store.series("metrics").write("cpu", 0.5, {"host": "a"}, durable=True)
    store.vector("docs", dimensions=2).upsert("a", [1.0, 0.0], {"lang": "en"}, durable=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str], Path]]:
    """A store that this process has open and serves; its address and the options for it."""
    folder = tmp_path_factory.mktemp("served")
    make_certificates(str(folder / "keys"), ["127.0.0.1"], 10)
    digest = hashlib.sha256(b"secret").hexdigest()
    (folder / "tokens").write_text(f'[tokens.me]\nsha256 = "{digest}"\nrights = {{ "*" = "admin" }}\n')
    with penstock.open(folder / "store") as store:
        keys = {"certificate": folder / "keys/server.pem", "key": folder / "keys/server.key"}
        port = penstock.serve_tcp(store, "127.0.0.1", 0, tokens=folder / "tokens", **keys)
        yield (
            f"penstock://127.0.0.1:{port}",
            ["--token", "secret", "--authority", str(folder / "keys/authority.pem")],
            folder,
        )


def test_every_command_is_here() -> None:
    import typer

    paths = {path for path, _ in commands_below(typer.main.get_command(app))}
    assert paths - set(ON_A_STORE) - ELSEWHERE == set()
    assert (set(ON_A_STORE) | ELSEWHERE) - paths == set()


@pytest.mark.parametrize("how", ["open", "served", "closed"])
def test_every_command_and_its_json(how: str, served: tuple[str, list[str], Path], tmp_path: Path) -> None:
    address, options, folder = served
    if how == "closed":
        address, options = str(tmp_path / "closed"), []
        with penstock.open(address) as store:
            fill(store)
    elif how == "open":
        address, options = str(folder / "store"), []
    if how != "closed":
        with penstock.connect(folder / "store") as store:
            for name in store.tables():
                store.drop(name)
            fill(store)
    for path, (arguments, shape) in ON_A_STORE.items():
        words = [str(tmp_path / "backups") if word == "BACKUPS" else word for word in arguments]
        ended = run(*path, address, *words, *options, *([] if shape is None else ["--json"]))
        if how == "served" and path == ("backup",):
            assert (ended.code, "on that machine" in ended.err) == (2, True)
            continue
        assert (ended.code, "penstock: " in ended.err) == (0, False), (path, ended)  # the owner here logs, too
        if shape is not None:
            assert ended.objects, path
            assert [wrong for line in ended.data.splitlines() if (wrong := mismatch(shape, line))] == [], (path, ended)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": 1, "b": [{"c": null}], "d": "2026-03-01T12:00:00Z"}', ""),
        (b'{"a": true, "b": [], "d": "2026-03-01T12:00:00Z"}', "$.a"),
        (b'{"a": -1, "b": [], "d": "2026-03-01T12:00:00Z"}', "$.a"),
        (b'{"a": 1, "b": [{"c": 1}], "d": "2026-03-01T12:00:00Z"}', "$.b[0].c"),
        (b'{"a": 1, "b": [], "d": "2026-03-01T12:00:00"}', "$.d"),
        (b'{"a": 1, "b": [], "d": null}', "$.d"),
        (b'{"a": 1, "b": []}', "missing"),
        (b'{"a": 1, "b": [], "d": "2026-03-01T12:00:00Z", "e": 0}', "unknown field"),
    ],
)
def test_a_shape_is_held(line: bytes, words: str) -> None:
    wrong = mismatch({"a": Natural, "b": [{"c": str | None}], "d": Moment}, line)
    assert (words in wrong) if words else not wrong


def test_an_empty_store_and_an_empty_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    assert run("status", folder).code == 3
    assert run("init", folder).code == 0
    again = run("init", folder)
    assert (again.code, "already a store" in again.err) == (2, True)
    for path, (arguments, _) in ON_A_STORE.items():
        ended = run(*path, folder, *(str(tmp_path / "b") if one == "BACKUPS" else one for one in arguments))
        missing = any(word in arguments for word in ("users", "spare", "events", "metrics", "docs"))
        assert ended.code == (3 if missing else 0), (path, ended)
        assert ended.err.count("\n") == missing, (path, ended)


# What a command ends with on a store that opens, and whose files of rows and messages are damaged: 0 if it needs none.
ON_DAMAGED_FILES: dict[tuple[str, ...], int] = {
    **dict.fromkeys(ON_A_STORE, 0),
    **dict.fromkeys([("get",), ("scan",), ("queue", "tail"), ("queue", "dump")], 6),
    **dict.fromkeys([("series", "write"), ("series", "select"), ("series", "query"), ("vector", "search")], 6),
    **dict.fromkeys([("keep-snapshot",), ("backup",)], 6),
    ("repair",): 2,  # there is no snapshot to repair it from
    ("chunks", "verify"): 1,
    ("check",): 1,
}


def flip(path: Path, at: int) -> None:
    """Change a bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files that hold a store's contents; not those that each opening writes."""
    passing = {"LOCK", "OPENING", "TIME", "manifest.owner", "manifest-lock", "owner.log"}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in passing
    }


def test_every_command_on_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # the owner is in this process
    folder = tmp_path / "store"
    with penstock.open(folder) as store:
        fill(store)
        for name in store.tables():
            store.compact(name)
    damaged = list(folder.glob("tables/**/*.sst"))
    assert len(damaged) == 3
    for file in damaged:
        flip(file, file.stat().st_size // 3)
    with penstock.open(folder):
        (messages,) = folder.glob("tables/**/*.data")
        flip(messages, 170)  # of the first message
        before = {file: file.read_bytes() for file in [*damaged, messages]}
        for path, (arguments, shape) in ON_A_STORE.items():
            words = [str(tmp_path / "backups") if word == "BACKUPS" else word for word in arguments]
            ended = run(*path, str(folder), *words, *([] if shape is None else ["--json"]))
            assert ended.code == ON_DAMAGED_FILES[path], (path, ended)
            if ended.code in {2, 6}:
                assert (ended.err.count("\n"), ended.data) == (1, b""), (path, ended)
            elif shape is not None:
                assert [wrong for line in ended.data.splitlines() if (wrong := mismatch(shape, line))] == [], path
            if path in {("check",), ("chunks", "verify")}:
                assert (ended.objects[0]["well"], bool(ended.objects[0]["damage"])) == (False, True)
            for file, was in before.items():  # what is damaged stays for a salvage, and new messages come after it
                assert file.read_bytes().startswith(was), (path, file)
        assert not (tmp_path / "backups" / "BACKUPS").exists() or run("check", str(tmp_path / "backups")).code == 3


# Commands on a store that does not open: of each way to reach one, and each that may create a store.
ON_A_DEAD_STORE = [
    ("status",), ("get",), ("put",), ("queue", "tail"), ("table", "create"), ("backup",), ("check",),
]  # fmt: skip


def test_a_store_that_does_not_open(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with penstock.open(folder) as store:
        fill(store)
        assert run("backup", str(folder), str(tmp_path / "backups")).code == 0
    flip(folder / "STORE", (folder / "STORE").stat().st_size - 1)
    before = contents(folder)
    commands = [
        [*path, str(folder), *(str(tmp_path / "more") if one == "BACKUPS" else one for one in ON_A_STORE[path][0])]
        for path in ON_A_DEAD_STORE
    ]
    commands += [["console", str(folder)], ["init", str(folder)], ["http", str(folder)]]
    commands += [["cluster", "init", str(tmp_path / "c"), "--member", "a=127.0.0.1:7401", "--from", str(folder)]]
    for command in commands:
        ended = run(*command)
        assert (ended.code, ended.err.count("\n"), ended.data) == (6, 1, b""), (command, ended)
        assert contents(folder) == before, command
    assert not (tmp_path / "more").exists()
    assert not (tmp_path / "c").exists()
    restored = run("restore", str(tmp_path / "backups"), str(tmp_path / "copy"), "--json")
    assert (restored.code, restored.objects[0]["number"]) == (0, 1)
    with penstock.open(tmp_path / "copy") as store:
        assert store.kv("users", value="json").get(b"ada") == {"born": [1815], "note": "[/x] [error]"}
    assert run("check", str(tmp_path / "backups")).out == "all is well\n"
    saved = run("salvage", str(tmp_path / "copy"), str(tmp_path / "saved"), "--json")
    assert (saved.code, saved.objects[0]["rows"]["users"]) == (0, 1)  # type: ignore[index]


def test_a_console_of_an_empty_store(tmp_path: Path) -> None:
    ended = Event()
    (port,) = free_ports(1)

    def interrupt() -> None:
        while not ended.wait(0.02):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    with penstock.open(tmp_path / "store"):
        thread = Thread(target=interrupt)
        thread.start()
        try:
            result = run("console", str(tmp_path / "store"), "--port", str(port), "--json")
        finally:
            ended.set()
            thread.join()
    assert result.code == 0, result
    assert mismatch({"address": str, "write": bool}, result.data) == ""


def test_cluster_commands_without_the_files_of_one(tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "cluster.toml").write_bytes(b"cluster = \xff")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "damaged", tmp_path / "empty"):
        before = contents(folder)
        for command in (
            ["cluster", "status", str(folder), "--token", "x"],
            ["cluster", "run", str(folder), "a", "--data", str(tmp_path / "data")],
            ["cluster", "replace", str(folder), "a"],
            ["console", str(tmp_path / "store"), "--cluster", str(folder), "--token", "x"],
        ):
            ended = run(*command)
            assert (ended.code, ended.err.count("\n"), ended.data) == (2, 1, b""), (command, ended)
            assert contents(folder) == before
    assert not (tmp_path / "data").exists()


# -- what is printed


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with penstock.open(tmp_path_factory.mktemp("cli") / "s") as opened:
        yield opened


HOSTILE = [b"[/x]", b"[error]", b"[bold]b[/bold]", b"x" * 300, b"a\nb", b"\x1b[2J", b"\x00\xff", b"\ttab", b""]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_comes_out_as_it_went_in(store: Store, value: bytes) -> None:
    path = store.path
    store.kv("raw")
    assert run("put", path, "raw", "k", "-", stdin=value).code == 0
    assert store.kv("raw").get(b"k") == value
    assert run("get", path, "raw", "k").data == value
    text = run("get", path, "raw", "k", terminal=True).out
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    if value:
        assert run("put", path, "raw", "again", text.rstrip("\n")).code == 0
        assert store.kv("raw").get(b"again") == value
    (row,) = run("scan", path, "raw", "--prefix", "k", "--json").objects
    expected: Any = value.decode() if value != b"\x00\xff" else {"hex": "00ff"}
    assert row == {"key": "k", "value": expected}


def test_values_have_the_type_of_their_table(store: Store) -> None:
    path = store.path
    for kind, text, value in [
        ("int64", "-5", -5),
        ("float64", "2.5", 2.5),
        ("json", '{"a":[1]}', {"a": [1]}),
        ("utf8", "é", "é"),
    ]:
        table: Any = store.kv(f"of_{kind}", value=kind)  # type: ignore[call-overload]
        assert run("put", path, f"of_{kind}", "k", text).code == 0
        assert table.get(b"k") == value
        assert run("get", path, f"of_{kind}", "k").data == text.encode()
    assert run("series", "write", path, "signed", "cold", "-0.5").code == 3  # no such table: the number was taken
    for kind, text in [("int64", "x"), ("json", "{"), ("int64", "1.5")]:
        ended = run("put", path, f"of_{kind}", "k", text)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
    store.kv("by_text", key="utf8", value="utf8").put("0xzz", "v", durable=True)
    assert run("get", path, "by_text", "0xzz").data == b"v"


def test_rows_are_left_out_aloud_and_only_at_a_terminal(store: Store) -> None:
    table = store.kv("many")
    table.put_many({b"%04d" % number: b"v" * 200 for number in range(1_200)}, durable=True)
    assert run("scan", store.path, "many").data.count(b"\n") == 1_200
    ended = run("scan", store.path, "many", terminal=True)
    assert ended.out.count("\n") == 21
    assert "--limit 0" in ended.err
    assert all(len(line) > 200 for line in ended.out.splitlines()[1:])  # not wrapped, not shortened
    whole = run("scan", store.path, "many", "--limit", "1200", terminal=True)
    assert (whole.out.count("\n"), whole.err) == (1_201, "")


def test_a_terminal_is_told_that_there_is_nothing(store: Store, tmp_path: Path) -> None:
    store.kv("unwritten")
    for arguments in (
        ("chunks", "list", store.path, "unwritten"),
        ("jobs", "list", store.path, "--table", "unwritten"),
    ):
        at_terminal, piped = run(*arguments, terminal=True), run(*arguments)
        assert (at_terminal.out, at_terminal.err.startswith("penstock: there are none")) == ("", True)
        assert (piped.out, piped.err) == ("", "")


def test_a_table_is_described_by_what_a_user_chose_and_counts(store: Store) -> None:
    queue = store.queue("described", shards=3)
    queue.put_many([b"%d" % number for number in range(9)], keys=[b"%d" % number for number in range(9)], durable=True)
    for name in ("one", "two"):
        consumer = queue.consumer(name)
        consumer.ack(consumer.get(9))
    (fields,) = run("table", "describe", store.path, "described", "--json").objects
    assert (fields["messages"], fields["consumers"]) == (9, 2)  # not one for each shard
    store.vector("near", dimensions=3, metric="dot")
    (fields,) = run("table", "describe", store.path, "near", "--json").objects
    assert (fields["dimensions"], fields["metric"]) == (3, "dot")


def test_the_version_is_printed_and_no_variable_asks_for_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").out == f"penstock {penstock.__version__}\n"
    monkeypatch.setenv("PENSTOCK_VERSION", "1")
    assert "healthy" in run("status", store.path).out


def test_lines_of_a_file_become_messages_and_lines_again(store: Store) -> None:
    store.queue("lines")
    text = b"one\ntwo\n\nfour"
    assert run("queue", "put", store.path, "lines", "-", stdin=text).out == "4 messages, durable\n"
    assert run("queue", "dump", store.path, "lines").data == text + b"\n"
    store.queue("lines").put(b"a\nb", durable=True)
    refused = run("queue", "dump", store.path, "lines")
    assert (refused.code, "--json" in refused.err) == (2, True)


def test_a_consumer_is_moved(store: Store) -> None:
    queue = store.queue("moved")
    queue.put_many([b"%d" % number for number in range(10)], durable=True)
    for to, position in [("5", 5), ("latest", 11), ("earliest", 1), ("1970-01-02", 1), ("2999-01-01T00:00:00Z", 11)]:
        assert run("queue", "seek", store.path, "moved", "c", to).code == 0
        assert queue.consumer("c").position == {0: position}
    assert run("queue", "seek", store.path, "moved", "c", "yesterday").code == 2
    assert run("queue", "tail", store.path, "moved", "--limit", "2").data.count(b"\n") == 2


@pytest.mark.parametrize(
    ("options", "first"), [(["--start", "earliest", "--limit", "3"], 0), (["--limit", "3"], 2), (["--start", "4"], 3)]
)
def test_tail_follows_without_a_gap(
    store: Store, monkeypatch: pytest.MonkeyPatch, options: list[str], first: int
) -> None:
    queue = store.queue("followed", shards=1)
    queue.put_many([b"%d" % number for number in range(queue.bounds()[0].next - 1, 5)], durable=True)
    looks = 0

    def look(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise Closed("enough was seen")

    monkeypatch.setattr("penstock.cli.queues.pause", look)
    lines = run("queue", "tail", store.path, "followed", "--follow", *options).data.decode().splitlines()
    assert [line.rsplit("\t", 1)[1] for line in lines] == [str(number) for number in range(first, 5)]


def test_a_plot_and_wrong_ranges(store: Store) -> None:
    series = store.series("plotted")
    for second in range(0, 300, 10):
        series.write(
            "load", float(second % 70), {"host": "\x1b[31m"}, time=1_000_000_000 * 1_000_000 + second * 1_000_000
        )
    store.flush()
    early = run("series", "query", store.path, "plotted", "load", "--end", "0001-01-02", "--last", "1e9")
    assert (early.code, "the year 1" in early.err) == (2, True)
    where = ["--end", "1000000300", "--last", "300"]
    drawn = run("series", "query", store.path, "plotted", "load", *where, terminal=True).out
    assert any(0x2800 < ord(letter) < 0x2900 for letter in drawn)
    assert "\x1b[31m" not in drawn.splitlines()[-1].replace("\x1b[36m", "")
    assert run("series", "query", store.path, "plotted", "load", *where, "--start", "0").code == 2
    assert run("series", "query", store.path, "plotted", "load", "--last", "nan").code == 2
    assert run("series", "write", store.path, "plotted", 'load{host=~"a"}', "1").code == 2


def test_a_live_page_fits_its_terminal(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.kv("a" * 63)
    store.kv("b"), store.kv("c")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "14")
    drawn = run("top", store.path, "--count", "2", "--every-s", "0.1", terminal=True).out
    assert drawn.count("\x1b[H") == 2
    lines = [re.sub(r"\x1b\[[\d;]*[mHJK]", "", line) for line in drawn.split("\x1b[H")[2].splitlines()]
    assert len(lines) == 14
    assert "lines more: `penstock status`" in lines[-1]
    assert max(map(cell_len, lines)) <= 60
    assert any(line.endswith("…") for line in lines)
    assert "…" not in run("status", store.path, terminal=True).out
    assert cut("\x1b[1mabc\x1b[0mdef", 6) == "\x1b[1mabc\x1b[0mdef"
    assert cut("漢字漢字", 6) == "漢字…\x1b[0m"
    assert cut("\x1b[1mabc\x1b[0mdef", 5) == "\x1b[1mabc\x1b[0md…\x1b[0m"


def test_wrong_use_is_one_line(store: Store, tmp_path: Path) -> None:
    path = store.path
    store.kv("users"), store.queue("events"), store.vector("docs", dimensions=2)
    for arguments, code, words in [
        (("tabl",), 2, "Did you mean 'table'"),
        (("get", path), 2, "penstock get --help"),
        (("get", path, "users", "nobody"), 3, "there is no key nobody"),
        (("get", path, "users", "0xzz"), 2, "is not a key"),
        (("scan", path, "nothing"), 3, "there is no table nothing"),
        (("scan", path, "events"), 2, "queue"),
        (("status", str(tmp_path / "no")), 3, "or see penstock init"),
        (("check", path, "--number", "1"), 2, "not a folder of backups"),
        (("table", "create", path, "t", "queue", "--dimensions", "3"), 2, "--dimensions"),
        (("table", "create", path, "users", "kv"), 2, "already"),
        (("table", "create", path, "t", "vector"), 2, "--dimensions"),
        (("vector", "search", path, "docs"), 2, "--like"),
        (("vector", "search", path, "docs", "[[1, 0]]"), 2, "one at a time"),
        (("vector", "upsert", path, "docs", "a", "[1"), 2, "JSON"),
        (("vector", "upsert", path, "docs", "a", "[" * 100_000), 2, "JSON"),
        (("queue", "seek", path, "events", "c", "9" * 5_000), 2, "not a time"),
        (("queue", "tail", path, "events", "--start", "9" * 5_000), 2, "start is"),
        (("queue", "tail", path, "events", "--start", "time:" + "9" * 5_000), 2, "start is"),
        (("top", path, "--every-s", "0"), 2, "--every-s"),
        (("status", "penstock://127.0.0.1:1", "--token", "x", "--timeout-s", "0.2"), 4, ""),
        (("bench", str(tmp_path / "no")), 2, "not a folder"),
        (("token", "new", "a", "--right", "x=all"), 2, "'x=all': give TABLE=read, TABLE=write or TABLE=admin"),
    ]:
        ended = run(*arguments)
        assert ended.code == code, (arguments, ended)
        assert ended.err.startswith("penstock: ")
        assert words in ended.err
        assert ended.err.count("\n") == 1, ended.err
        assert ended.data == b""


def test_a_job_is_shown_and_only_a_failed_one_is_retried(store: Store) -> None:
    store.kv("jobs").put(b"k", b"v", durable=True)
    store.compact("jobs")
    (job,) = run("jobs", "list", store.path, "--table", "jobs", "--state", "done", "--json").objects
    details = run("jobs", "show", store.path, str(job["job"]), "--json").objects[0]
    assert {name: details[name] for name in ("job", "kind", "table", "state")} == {
        "job": job["job"], "kind": "flush", "table": "jobs", "state": "done",
    }  # fmt: skip
    again = run("jobs", "retry", store.path, str(job["job"]))
    assert (again.code, "has not failed" in again.err) == (2, True)
    assert [run("jobs", verb, store.path, "999999").code for verb in ("show", "retry")] == [3, 3]


def test_deleting_asks_first(store: Store) -> None:
    store.kv("kept")
    refused = run("table", "drop", store.path, "kept", stdin=b"n\n")
    assert (refused.code, "nothing was changed" in refused.err) == (1, True)
    assert run("table", "drop", store.path, "kept").code == 1
    assert "kept" in store.tables()
    assert run("table", "drop", store.path, "kept", stdin=b"y\n").code == 0
    assert "kept" not in store.tables()


def test_a_token_that_the_server_takes(tmp_path: Path) -> None:
    from penstock.server.rights import Tokens

    result = run("token", "new", "loader", "--right", "*=read", "--right", "events=write")
    token = result.err.rsplit(" ", 1)[1].strip()
    rights = Tokens.parse(result.out).rights_of(token)
    assert rights is not None
    assert dict(rights.tables) == {"*": "read", "events": "write"}


def test_bench_leaves_nothing(tmp_path: Path) -> None:
    rows = run("bench", str(tmp_path), "--rows", "1000", "--json").objects
    assert len(rows) == 5
    assert os.listdir(tmp_path) == []


# -- where options come from


def test_the_strongest_value_wins(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.queue("numbers").put_many([b"%d" % number for number in range(9)], durable=True)

    def lines(*more: str) -> int:
        return run("queue", "tail", store.path, "numbers", *more).data.count(b"\n")

    monkeypatch.chdir(tmp_path)
    assert lines() == 9
    (tmp_path / "penstock.toml").write_text('token = "t0p"\n[queue.tail]\nlimit = 2\n')
    assert lines() == 2
    monkeypatch.setenv("PENSTOCK_QUEUE_TAIL_LIMIT", "3")
    assert lines() == 3
    assert lines("--limit", "4") == 4
    listing = run("config", "show").out
    assert "queue tail\tlimit\t3\t$PENSTOCK_QUEUE_TAIL_LIMIT" in listing
    assert "get\ttoken\t(set)\tpenstock.toml" in listing
    assert "t0p" not in listing
    monkeypatch.delenv("PENSTOCK_QUEUE_TAIL_LIMIT")
    assert "queue tail\tlimit\t2\tpenstock.toml" in run("config", "show").out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[foo]\n", "no command foo"),
        ("speed = 1\n", "an option speed"),
        ("[queue.tail]\nspeed = 1\n", "has no speed"),
        ("[queue]\ntail = 1\n", "section"),
        ("x = \n", "cannot be read"),
        ("limit = 'many'\n", "--limit"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    text: str, words: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.toml").write_text(text)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "other.toml"))
    ended: Ended = run("scan", store.path, "none")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended
    assert words in ended.err
