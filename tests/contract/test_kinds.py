"""Every kind of table passes the contract of kinds: kv, queue, series, and a toy kind that Penstock does not know."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from commands import penstock as penstock_command

import penstock
from penstock.errors import KindMismatch
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.http.console_reading import describe
from penstock.http.console_sampling import StoreReader
from penstock.kv import section as kv_section
from penstock.lsm.rows import DELETE, KEY_BYTES_MAX, NEVER, PUT
from penstock.queue import section as queue_section
from penstock.queue.messages import Messages
from penstock.registry import KV, QUEUE, series_kind
from penstock.series.aggregate import AggregateQuery
from penstock.series.labels import LabelTable, check_labels
from penstock.series.queries import SeriesQuery, encode_query
from penstock.series.section import BucketTrim, MetricMetadata, SampleBlock, SeriesDelete, SeriesSection
from penstock.series.section_codec import encode_section
from penstock.testing.kinds import KindContract, KindSample, QuerySample
from penstock.testing.kinds.accounts import section as accounts_section
from penstock.testing.kinds.accounts.kind import AccountsKind
from penstock.testing.kinds.accounts.table import BalanceQuery
from penstock.testing.kinds.sample import info_of

PACKAGE = str(Path(__file__).parent / "accounts_package")  # as if it were installed: it has the entry point


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Iterator[None]:
    """The toy kind's package is found by the processes that this one starts."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = PACKAGE if before is None else f"{PACKAGE}:{before}"
    yield
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


# -- kv


def _kv_row(number: int) -> tuple[bytes, bytes]:
    return b"key %06d" % number, b"value %d" % number


def _kv_rows(*operations: tuple[bytes, Any]) -> kv_section.Rows:
    rows = kv_section.Rows()
    rows.plain = all(isinstance(value, bytes) for _, value in operations)
    rows.update(operations)
    return rows


class TestKv(KindContract):
    sample = KindSample(
        kind=KV,
        write=lambda table, number: table.put(*_kv_row(number)),
        rows=lambda table: list(table.scan()),
        expected=lambda numbers: sorted(map(_kv_row, numbers)),
        sections=[
            _kv_rows((b"a", b"1"), (b"b", b"")),
            _kv_rows((b"a", (DELETE, b"", NEVER)), (b"c", (PUT, b"2", 1_800_000_000_000_000)), (b"d", b"3")),
            kv_section.Ranges([(b"a", b"b"), (b"c", b"d")]),
        ],
        refused=[
            kv_section.encode(kv_section.Rows()),
            kv_section.encode(_kv_rows((bytes(KEY_BYTES_MAX + 1), b""))),
            kv_section.encode(kv_section.Ranges([(b"b", b"a")])),
            b"",
        ],
        arrow=lambda numbers: pa.table(
            dict(zip(("key", "value"), map(list, zip(*map(_kv_row, numbers), strict=True)), strict=True)),
            pa.schema([("key", pa.binary()), ("value", pa.binary())]),
        ),
        many=150_000,
        queries=[
            QuerySample(
                name="count",
                argument=msgspec.msgpack.encode((b"", None)),
                answer=lambda numbers: [{"count": len(numbers)}],
            ),
            QuerySample(
                name="count",
                argument=msgspec.msgpack.encode((b"key 000010", b"key 000020")),
                answer=lambda numbers: [{"count": sum(10 <= number < 20 for number in numbers)}],
            ),
        ],
    )


# -- queue


def _message(number: int) -> bytes:
    return b"message %d" % number


def _puts(*payloads: bytes) -> queue_section.Puts:
    puts = queue_section.Puts()
    puts.add_many(Messages.of(list(payloads), None))
    return puts


class TestQueue(KindContract):
    sample = KindSample(
        kind=QUEUE,
        write=lambda table, number: table.put(_message(number), key=b"%d" % (number % 7)),
        rows=lambda table: sorted(table.to_arrow().column("payload").to_pylist()),
        expected=lambda numbers: sorted(map(_message, numbers)),
        sections=[_puts(b"a", b""), _puts(b"b" * 300), queue_section.Trim(3)],
        refused=[b"", b"\0" * 20, queue_section.encode(queue_section.Trim(0))],
        arrow=lambda numbers: pa.table(
            {"payload": list(map(_message, numbers)), "key": [b"%d" % (number % 7) for number in numbers]},
            pa.schema([("payload", pa.binary()), ("key", pa.binary())]),
        ),
        many=150_000,
    )


# -- series


FIRST_US, HOUR_US = 1_500_000_000_000_000, 3_600_000_000


def _sample(number: int) -> tuple[str, float, dict[str, str], int]:
    return "cpu", number + 0.5, {"host": f"h{number % 5}"}, FIRST_US + 10 * HOUR_US * number


def _write_sample(table: Any, number: int) -> None:
    metric, value, labels, time = _sample(number)
    table.write(metric, value, labels, time=time)


def _sample_rows(table: Any) -> list[Any]:
    rows = table.to_arrow().set_column(2, "time", table.to_arrow().column("time").cast(pa.int64())).to_pylist()
    return sorted((row["metric"], row["value"], row["labels"], row["time"]) for row in rows)


def _samples(*samples: tuple[str, int, float], metric: str = "cpu") -> SampleBlock:
    hosts = sorted({host for host, _, _ in samples})
    series = LabelTable.of([check_labels(metric, {"host": host}) for host in hosts])
    index = np.array([hosts.index(host) for host, _, _ in samples], np.uint32)
    values = np.array([value for _, _, value in samples], np.float64)
    return SampleBlock(series, index, np.array([time for _, time, _ in samples], np.int64), values.view(np.uint64))


class TestSeries(KindContract):
    sample = KindSample(
        kind=series_kind(),
        write=_write_sample,
        rows=_sample_rows,
        expected=lambda numbers: sorted(
            (metric, value, list(labels.items()), time) for metric, value, labels, time in map(_sample, numbers)
        ),
        sections=[
            SeriesSection(_samples(("a", 1, 1.5), ("b", -1, float("inf")), ("a", HOUR_US * 50, 2.5))),
            SeriesSection(MetricMetadata("cpu", "gauge", "s", "of the host"), _samples(("a", 1, 2.0), ("c", 1, 3.0))),
            SeriesSection(SeriesDelete('cpu{host=~"a|c"}', 0, 2), _samples(("c", 1, 4.0))),
        ],
        refused=[
            b"",
            encode_section(SeriesSection()),
            encode_section(SeriesSection(BucketTrim(5))),
            encode_section(SeriesSection(SeriesDelete("cpu{", 0, 1))),
            encode_section(SeriesSection(_samples(("a", 1 << 62, 1.0)))),
        ],
        arrow=lambda numbers: pa.table(
            {
                "metric": [_sample(number)[0] for number in numbers],
                "value": [_sample(number)[1] for number in numbers],
                "host": [_sample(number)[2]["host"] for number in numbers],
                "time": [_sample(number)[3] for number in numbers],
            }
        ),
        queries=[
            QuerySample(
                name="label_values",
                argument=encode_query(SeriesQuery(name="host")),
                answer=lambda numbers: [{"name": f"h{number}"} for number in range(min(5, len(numbers)))],
            ),
            QuerySample(
                name="aggregate",
                argument=encode_query(AggregateQuery("cpu", by=("host",), function="sum")),
                answer=lambda numbers: [
                    {
                        "labels": [("host", f"h{host}")],
                        "time": None,
                        "value": sum(n + 0.5 for n in numbers if n % 5 == host),
                    }
                    for host in range(5)
                ],
            ),
        ],
    )


# -- the toy kind


def _booking(number: int) -> tuple[str, int]:
    return f"account {number % 5}", number * (-1) ** number


def _balances(numbers: Sequence[int], prefix: str = "") -> list[dict[str, Any]]:
    by_account: dict[str, list[int]] = {}
    for account, amount in map(_booking, numbers):
        if account.startswith(prefix):
            by_account.setdefault(account, []).append(amount)
    return [
        {"account": account, "bookings": len(amounts), "balance": sum(amounts)}
        for account, amounts in sorted(by_account.items())
    ]


def _raw(*bookings: tuple[bytes, int]) -> bytes:
    return accounts_section.encode(accounts_section.Bookings(bookings))


class TestAccounts(KindContract):
    sample = KindSample(
        kind=AccountsKind(),
        write=lambda table, number: table.book(*_booking(number)),
        rows=lambda table: table.balances().to_pylist(),
        expected=_balances,
        sections=[
            accounts_section.Bookings([(b"a", 1)]),
            accounts_section.Bookings([(b"a", -1), (b"b", 2), (b"a", 3)]),
        ],
        refused=[
            b"",
            struct.pack("<I", 0),
            _raw((b"", 1)),
            _raw((b"a" * 101, 1)),
            _raw((b"\n", 1)),
            _raw((b"a", 1 << 40)),
        ],
        arrow=lambda numbers: pa.table(
            dict(zip(("account", "amount"), map(list, zip(*map(_booking, numbers), strict=True)), strict=True))
        ),
        queries=[
            QuerySample(name="balances", argument=msgspec.msgpack.encode(BalanceQuery()), answer=_balances),
            QuerySample(
                name="balances",
                argument=msgspec.msgpack.encode(BalanceQuery("account 3")),
                answer=lambda numbers: _balances(numbers, "account 3"),
            ),
        ],
    )


def test_a_query_reads_one_moment(tmp_path: Path) -> None:
    """Transfers between accounts of several shards: their sum is 0 at every LSN, for the owner and for clients."""
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as client:
        accounts = store.create("bank", "accounts", shards=4)

        def write() -> None:
            for number in range(300):
                accounts.transfer(f"from {number % 13}", f"to {number % 11}", number, durable=True)

        writer, looks = threads.spawn(write, name="writer"), 0
        while writer.is_alive() or not looks:
            for reading in (accounts, client.table("bank")):
                assert sum(reading.balances().column("balance").to_pylist()) == 0
            looks += 1
        writer.join()
        assert sum(client.table("bank").balances().column("bookings").to_pylist()) == 600


def test_a_long_answer_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.scans.PAGE_BYTES", 20_000)
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as client:
        accounts = store.create("bank", "accounts", shards=2)
        names = [f"account {number:06}" for number in range(5_000)]
        for name in names:
            accounts.book(name, 1)
        store.flush()
        balances = client.table("bank").balances()
        assert balances.column("account").to_pylist() == names
        pages = client.port.query(info_of(store.port, "bank"), "balances", msgspec.msgpack.encode(BalanceQuery()))
        assert next(pages).num_rows < len(names)
        del pages  # the rest is not wanted: the owner is told
        with store.snapshot():
            pass


def test_a_detached_owner_knows_the_kind(tmp_path: Path) -> None:
    penstock.open(tmp_path / "store").close()
    with penstock.connect(tmp_path / "store") as client:
        bank = client.create("bank", "accounts", shards=2)
        bank.transfer("a", "b", 5, durable=True)
        assert (bank.balance("a"), bank.balance("b")) == (-5, 5)


def test_the_command_line_and_the_console_show_a_kind_without_statistics(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as client:
        store.create("bank", "accounts").book("a", 1, durable=True)
        store.kv("users").put(b"a", b"1", durable=True)
        status = penstock_command("status", store.path, "--json")
        sizes = {line["table"]: line["rows"] for line in json.loads(status.out)["tables"]}
        assert (status.code, sizes) == (0, {"bank": None, "users": 1})
        described = penstock_command("table", "describe", store.path, "bank")
        assert (described.code, described.err) == (0, "")
        assert "accounts" in described.out
        sample = StoreReader(client, SystemClock()).read()
        assert {table["name"]: table.get("rows") for table in sample["tables"]} == {"bank": None, "users": 1}
        bank = client.table("bank")
        assert describe(client, bank, info_of(store.port, "bank"))["kind"] == "accounts"
        assert penstock_command("table", "drop", store.path, "bank", "--yes").code == 0
        assert store.tables() == ["users"]


def test_a_batch_looks_a_table_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as client:
        store.kv("users")
        names: list[str] = []
        find = client.port.table

        def count(name: str) -> Any:
            names.append(name)
            return find(name)

        monkeypatch.setattr(client.port, "table", count)
        with client.batch() as batch:
            for number in range(10):
                batch.kv("users").put(b"%d" % number, b"")
                batch.table("users").put(b"%d" % number, b"x")
            with pytest.raises(KindMismatch, match=r"table users is of the kind kv, not queue: use kv\('users'\)"):
                batch.queue("users")
        assert names == ["users"]
        assert len(dict(store.kv("users").scan())) == 10
