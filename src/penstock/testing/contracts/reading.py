"""The contract of `Reading`: the same rows in the owner, through the gateway and in a snapshot.

The tests read what `fill` wrote and change nothing, so all of them share one store.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.errors import Invalid, NotFound
from penstock.journal.partitions import PartitionId, partition_id
from penstock.kinds import Port, Reading, partitions_of
from penstock.kv.values import Options, encode_options
from penstock.partition.ledger_records import TableInfo
from penstock.queue.options import encode_queue_options, queue_options
from penstock.registry import kind_named

ABSENT = partition_id(60_000, 0)  # of a table that does not exist
ROWS: dict[bytes, bytes] = {
    b"": b"of the empty key",
    b"\x00": b"",
    b"\x00\x00": b"two",
    b"\xff": b"one",
    b"\xff\xff\xff": b"three",
    **{b"k%04d" % number: b"value of %d" % number for number in range(600)},
    **{b"large%d" % number: bytes([number]) * (3 << 20) for number in range(3)},  # more than a page of the gateway
}
DELETED_KEYS = [b"deleted", b"range1", b"range2"]
MESSAGES = [b"message %d" % number for number in range(300)]


def make_kv(port: Port, name: str, shards: int = 1) -> TableInfo:
    """Create a kv table of bytes."""
    return port.create(name, "kv", shards, encode_options(Options("bytes")))


def make_queue(port: Port, name: str, shards: int = 1) -> TableInfo:
    """Create a queue that keeps everything."""
    return port.create(name, "queue", shards, encode_queue_options(queue_options(None)))


def table_of(port: Port, info: TableInfo) -> Any:
    """Return the API of a table."""
    return kind_named(info.kind, info.name).table(port, info, durable=False)


def fill(port: Port) -> None:
    """Write what `ReadingContract` reads, without waiting for it."""
    plain, spread, events = make_kv(port, "plain"), make_kv(port, "spread", 3), make_queue(port, "events", 2)
    make_kv(port, "nothing")
    table = table_of(port, plain)
    table.put_many(dict.fromkeys([*ROWS, *DELETED_KEYS], b"old"))
    table.put_many(ROWS)
    table.delete(b"deleted")
    table.delete_range(b"range", b"rangf")
    table_of(port, spread).put_many({b"%d" % number: b"one moment" for number in range(30)})
    table_of(port, events).put_many(MESSAGES, keys=[b"%d" % (number % 7) for number in range(len(MESSAGES))])


def rows_of(batches: Iterator[Any]) -> list[tuple[bytes, bytes]]:
    """Return the (key, value) pairs of the record batches of a kv table."""
    return [
        pair
        for batch in batches
        for pair in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
    ]


def _in(start: bytes, end: bytes | None) -> list[tuple[bytes, bytes]]:
    return sorted((key, value) for key, value in ROWS.items() if key >= start and (end is None or key < end))


RANGES: list[tuple[bytes, bytes | None]] = [
    (b"", None),
    (b"", b""),
    (b"", b"\x00"),
    (b"\x00", b"k0003"),
    (b"k0003", b"k0003"),
    (b"k0003", b"k0003\x00"),
    (b"k0500", b"k0010"),
    (b"k0590", None),
    (b"k0599\x00", b"large1"),
    (b"large1", b"\xff"),
    (b"\xff\xff\xff\xff", None),
    (b"deleted", b"deletee"),
]


class ReadingContract(ABC):
    """Tests of a `Reading` that holds what `fill` wrote."""

    is_snapshot = False

    @abstractmethod
    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        """The reading under test."""

    @pytest.fixture
    def plain(self, reading: Reading) -> PartitionId:
        """The one shard of the table `plain`."""
        return self._shards(reading, "plain")[0]

    def _shards(self, reading: Reading, name: str) -> Sequence[PartitionId]:
        info = reading.table(name)
        assert info is not None
        return partitions_of(info)

    def test_tables(self, reading: Reading) -> None:
        tables = reading.tables()
        assert [info.name for info in tables] == ["events", "nothing", "plain", "spread"]
        assert [info.kind for info in tables] == ["queue", "kv", "kv", "kv"]
        assert [info.shards for info in tables] == [2, 1, 1, 3]
        assert [reading.table(info.name) for info in tables] == tables
        assert reading.table("absent") is None

    def test_a_lookup(self, reading: Reading, plain: PartitionId) -> None:
        for key in (b"", b"\x00", b"\xff\xff\xff", b"k0000", b"k0599", b"large2"):
            assert reading.lookup(plain, key) == ROWS[key]
        for key in (*DELETED_KEYS, b"k", b"k0600", b"z" * 60_000):
            assert reading.lookup(plain, key) is None
        assert reading.lookup(self._shards(reading, "nothing")[0], b"") is None

    def test_many_lookups(self, reading: Reading, plain: PartitionId) -> None:
        keys = [*sorted(ROWS, reverse=True), *DELETED_KEYS, b"k0001", b"k0001"]
        assert reading.lookup_many(plain, keys) == [ROWS.get(key) for key in keys]
        assert reading.lookup_many(plain, []) == []
        assert reading.lookup_many(plain, [b"k0007"]) == [ROWS[b"k0007"]]
        many = [b"k%04d" % (number % 700) for number in range(10_050)]  # more than one message takes
        assert reading.lookup_many(plain, many) == [ROWS.get(key) for key in many]
        large = [b"large%d" % (number % 3) for number in range(12)]  # more than one answer takes
        assert reading.lookup_many(plain, large) == [ROWS[key] for key in large]

    @pytest.mark.parametrize(("start", "end"), RANGES)
    def test_a_scan(self, reading: Reading, plain: PartitionId, start: bytes, end: bytes | None) -> None:
        rows = _in(start, end)
        assert list(reading.scan(plain, start, end, False)) == rows
        assert list(reading.scan(plain, start, end, True)) == rows[::-1]
        assert rows_of(reading.scan_arrow(plain, start, end)) == rows

    def test_a_scan_of_nothing(self, reading: Reading) -> None:
        nothing = self._shards(reading, "nothing")[0]
        assert list(reading.scan(nothing, b"", None, False)) == list(reading.scan(nothing, b"", None, True)) == []
        assert rows_of(reading.scan_arrow(nothing, b"", None)) == []

    def test_a_scan_may_be_left(self, reading: Reading, plain: PartitionId) -> None:
        for reverse in (False, True):
            scan = reading.scan(plain, b"", None, reverse)
            assert next(scan) == _in(b"", None)[-1 if reverse else 0]
            other = reading.scan(plain, b"k", None, reverse)
            assert next(other)[0] == (b"\xff\xff\xff" if reverse else b"k0000")
            assert next(scan) == _in(b"", None)[-2 if reverse else 1]
        del scan, other
        batches = reading.scan_arrow(plain, b"", None)
        assert next(batches).num_rows > 0

    def test_an_arrow_scan_has_lsns(self, reading: Reading, plain: PartitionId) -> None:
        lsns = [lsn for batch in reading.scan_arrow(plain, b"k", b"l") for lsn in batch.column("lsn").to_pylist()]
        assert len(lsns) == 600
        assert all(isinstance(lsn, int) for lsn in lsns)

    def test_messages(self, reading: Reading) -> None:
        payloads: list[bytes] = []
        for partition in self._shards(reading, "events"):
            rows = list(reading.scan(partition, b"", None, False))
            keys = [key for key, _ in rows]
            assert keys == sorted(set(keys))
            assert {len(key) for key in keys} == {8}
            assert list(reading.scan(partition, keys[3], keys[9], False)) == rows[3:9]
            assert reading.lookup(partition, keys[5]) == rows[5][1]
            assert reading.lookup_many(partition, keys[5:8]) == [value for _, value in rows[5:8]]
            assert reading.lookup(partition, bytes(8)) is None
            batches = list(reading.scan_arrow(partition, b"", None))
            payloads += [value for batch in batches for value in batch.column("payload").to_pylist()]
            assert sum(batch.num_rows for batch in batches) == len(rows)
        assert sorted(payloads) == sorted(MESSAGES)

    def test_what_is_not_there_is_not_found(self, reading: Reading, plain: PartitionId) -> None:
        acts: list[Callable[[PartitionId], object]] = [
            lambda partition: reading.lookup(partition, b"k"),
            lambda partition: reading.lookup_many(partition, [b"k", b"l"]),
            lambda partition: list(reading.scan(partition, b"", None, False)),
            lambda partition: list(reading.scan(partition, b"", None, True)),
            lambda partition: list(reading.scan_arrow(partition, b"", None)),
        ]
        for partition in (ABSENT, PartitionId(plain + 1)):  # a table, and a shard of one
            for act in acts:
                with pytest.raises(NotFound):
                    act(partition)

    def test_a_moment(self, reading: Reading, plain: PartitionId) -> None:
        shards = self._shards(reading, "spread")
        with reading.moment([*shards, plain]) as moment:
            rows = [row for shard in shards for row in moment.scan(shard, b"", None, False)]
            assert sorted(rows) == sorted((b"%d" % number, b"one moment") for number in range(30))
            assert moment.lookup(plain, b"k0042") == ROWS[b"k0042"]
            assert moment.lookup_many(plain, [b"k0001", b"absent"]) == [ROWS[b"k0001"], None]
            assert rows_of(moment.scan_arrow(plain, b"k0001", b"k0003")) == _in(b"k0001", b"k0003")
            assert list(moment.scan(plain, b"k", b"l", True)) == _in(b"k", b"l")[::-1]
            with moment.moment(shards) as inner:
                assert [row for shard in shards for row in inner.scan(shard, b"", None, False)] == rows

    def test_time(self, reading: Reading) -> None:
        first = reading.time_us()
        assert isinstance(first, int)
        assert 0 < first <= reading.time_us()

    @pytest.mark.parametrize("name", ["plain", "spread", "events", "nothing"])
    @pytest.mark.parametrize("count", [1, 4, 1_000])
    def test_pieces(self, reading: Reading, name: str, count: int) -> None:
        for partition in self._shards(reading, name):
            if not self.is_snapshot:
                with pytest.raises(Invalid, match="snapshot"):
                    reading.pieces(partition, count)
                continue
            whole = [batch.to_pylist() for batch in reading.scan_arrow(partition, b"", None)]
            pieces = reading.pieces(partition, count)
            assert all(piece.partition == partition for piece in pieces)
            read = [
                batch.to_pylist() for piece in pieces for batch in reading.scan_arrow(partition, piece.start, piece.end)
            ]
            assert list(itertools.chain(*read)) == list(itertools.chain(*whole))  # none twice, none missing
            assert all(one.end == other.start for one, other in itertools.pairwise(pieces))

    def test_pieces_of_a_range(self, reading: Reading, plain: PartitionId) -> None:
        if self.is_snapshot:
            read = [
                row
                for piece in reading.pieces(plain, 3, b"k0100", b"k0200")
                for row in rows_of(reading.scan_arrow(plain, piece.start, piece.end))
            ]
            assert read == _in(b"k0100", b"k0200")
            for count in (0, -1):
                with pytest.raises(Invalid):
                    reading.pieces(plain, count)
        for partition in (ABSENT, PartitionId(plain + 1)):
            with pytest.raises((NotFound, Invalid)):
                reading.pieces(partition, 1)
