"""What a kind must pass for each capability it has: see `penstock.kinds`.

Thread: a test's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.client.store import RemoteStore
from penstock.errors import Invalid, KindMismatch, PenstockError, PositionConflict, WaitExpired
from penstock.host.os_files import OsFileSystem
from penstock.journal.partitions import shard_number
from penstock.kinds import (
    QUERY_BYTES_MAX,
    BuildContext,
    FileReadable,
    Loadable,
    PreparedRows,
    Queryable,
    Replaceable,
    Serviced,
    Streamable,
    partitions_of,
)
from penstock.partition.ledger_records import TableInfo
from penstock.partition.reference import files_of, sealed
from penstock.store.querying import run_query
from penstock.store.store import Store
from penstock.testing.clock import FakeClock
from penstock.testing.disk import SimulatedDisk
from penstock.testing.kinds.sample import NAME, KindSample, info_of, open_simulated, opened, scanned


class HurriedClock(FakeClock):
    """A clock on which an hour passes between two calls."""

    def monotonic_s(self) -> float:
        self.advance(3_600.0)
        return super().monotonic_s()


def _build_context(store: Store | RemoteStore) -> BuildContext:
    """Return the context to build files for a store on this machine."""
    port = store.port
    return BuildContext(
        store.path,
        store.identity,
        lambda partition, number: port.stage(partition, number, 60.0),
        port.time_us(),
        "test",
    )


def _commit(store: Store | RemoteStore, info: TableInfo, kind: Any, loads: Sequence[PreparedRows]) -> None:
    with store.batch() as batch:
        for load in loads:
            if load.file is not None:
                batch.adopt(info.name, [load.file], shard_number(load.partition))
            else:
                batch.add_section(load.partition, kind.decode(load.payload), len(load.payload))


def _joined(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Return batches as a table; of no batches, a table without columns."""
    nonempty = [batch for batch in batches if batch.num_rows]
    return pa.Table.from_batches(nonempty, None if nonempty else pa.schema([]))


class AbilityContract:
    """One group of tests for each capability."""

    sample: KindSample

    def _prepare(self, store: Store | RemoteStore, numbers: Sequence[int]) -> list[PreparedRows]:
        kind, info = self.sample.kind, info_of(store.port)
        assert isinstance(kind, Loadable)
        assert self.sample.arrow is not None, "the sample must say how rows are loaded: arrow="
        rows = self.sample.arrow(numbers)
        rows = rows.cast(kind.load_schema(rows.schema, info.options))
        return kind.load(iter(rows.to_batches()), info, _build_context(store))

    # -- Loadable

    def test_loads_are_worth_writes(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Loadable):
            pytest.skip("not Loadable")
        with opened(tmp_path) as stores:
            self.sample.make(stores[0])
            at = 0
            for store in stores:
                info = info_of(store.port)
                tasks = [range(at, at + 5), range(at + 5, at + 10)]
                loads = [load for numbers in tasks for load in self._prepare(store, numbers)]
                assert sum(load.rows for load in loads) == 10
                _commit(store, info, kind, kind.bundle(loads, info, _build_context(store)))
                at += 10
                for reading in stores:
                    assert self.sample.rows(reading.table(NAME)) == self.sample.expected(range(at))

    def test_a_large_load(self, tmp_path: Path) -> None:
        kind, many = self.sample.kind, self.sample.many
        if not isinstance(kind, Loadable):
            pytest.skip("not Loadable")
        with opened(tmp_path) as (store, client):
            self.sample.make(store)
            info = info_of(client.port)
            loads = [
                load for numbers in (range(many), range(many, many + 3)) for load in self._prepare(client, numbers)
            ]
            for load in loads:
                assert load.file is None or load.file.file_name.endswith(kind.staged_suffix)
            _commit(client, info, kind, kind.bundle(loads, info, _build_context(client)))
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(range(many + 3))
            store.checkpoint()
            assert self.sample.rows(client.table(NAME)) == self.sample.expected(range(many + 3))

    def test_columns_that_do_not_fit_are_refused(self) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Loadable):
            pytest.skip("not Loadable")
        with pytest.raises(Invalid):
            kind.load_schema(pa.schema([pa.field("no such column", pa.int64())]), kind.options_default)

    def test_files_that_it_did_not_build_are_refused(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        with opened(tmp_path) as (store, _):
            self.sample.make(store)
            if not isinstance(kind, Loadable):
                with pytest.raises(KindMismatch):
                    store.stage(NAME)
                return
            (staged,) = store.stage(NAME)
            for name in files_of(staged.file_name):
                path = Path(store.path) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"this is not a file of the kind" * 100)
            with pytest.raises(PenstockError), store.batch() as batch:
                batch.adopt(NAME, [sealed(OsFileSystem(), store.path, staged)])
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(())
            assert store.troubles() == []

    # -- Replaceable

    def test_a_load_replaces_a_range(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Replaceable):
            pytest.skip("not Replaceable")
        assert isinstance(kind, Loadable)
        with opened(tmp_path) as (store, client):
            self.sample.write_all(self.sample.make(store), range(10))
            store.flush()
            info, context = info_of(client.port), _build_context(client)
            loads = self._prepare(client, range(20, 23))
            _commit(client, info, kind, kind.bundle_in_place(loads, info, context, (b"", None)))
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(range(20, 23))
            assert self.sample.arrow is not None
            rows = self.sample.arrow(range(3))
            rows = rows.cast(kind.load_schema(rows.schema, info.options))
            assert list(kind.inside(iter(rows.to_batches()), b"", None)) == rows.to_batches()
            with pytest.raises(Invalid):
                list(kind.inside(iter(rows.to_batches()), b"\xff" * 64, None))

    # -- FileReadable

    def test_pieces_are_read_from_files(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        if not isinstance(kind, FileReadable):
            pytest.skip("not FileReadable")
        with opened(tmp_path) as (store, client):
            table = self.sample.make(store)
            self.sample.write_all(table, range(50))
            store.flush()
            store.checkpoint()
            self.sample.write_all(table, range(50, 60))
            store.flush()
            with client.snapshot() as snapshot:
                pieces = snapshot.pieces(NAME, 6)
                self.sample.write_all(table, range(60, 70))
                store.flush()
                rows_read = 0
                for piece in pieces:
                    batches = kind.read_piece(piece, store.path, store.identity)
                    assert batches is not None, "the files can be read from here"
                    here, there = _joined(batches), _joined(snapshot.read(piece))
                    assert here.equals(there)
                    assert kind.check_piece(piece, store.path, store.identity) == []
                    blind = kind.read_piece(piece, str(tmp_path / "elsewhere"), store.identity)
                    assert blind is None or _joined(blind).equals(there)  # a piece may carry its rows
                    rows_read += here.num_rows
                with store.snapshot() as late:
                    assert rows_read < scanned(kind, late._port).num_rows

    # -- Streamable

    def test_a_consumer_moves_once(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Streamable):
            pytest.skip("not Streamable")
        with opened(tmp_path) as stores:
            self.sample.write_all(self.sample.make(stores[0]), range(12))
            stores[0].flush()
            readers: list[Store | RemoteStore] = [*stores]
            for reader, consumer in zip(readers, ("one", "two"), strict=True):
                info = info_of(reader.port)
                source = kind.source(reader.port, info)
                first, last = source.offsets("earliest"), source.offsets("latest")
                assert source.offsets(f"consumer:{consumer}") == first
                assert sum(last[shard] - first[shard] for shard in first) == 12 == source.lag(consumer)
                end = source.advance(first, 5, None)
                assert 0 < sum(end[shard] - first[shard] for shard in first) <= 5
                ranges = [(shard, first[shard], end[shard]) for shard in sorted(first)]
                for duplicate in (False, True):
                    with reader.batch() as batch:
                        batch.require(*kind.move(info, consumer, ranges))
                    assert batch.duplicate is duplicate
                assert source.offsets(f"consumer:{consumer}") == end
                wrong = [(shard, first[shard], last[shard]) for shard in sorted(first)]
                rows = self.sample.rows(reader.table(NAME))
                with pytest.raises(PositionConflict), reader.batch() as batch:
                    self.sample.write(batch.table(NAME), 100)
                    batch.require(*kind.move(info, consumer, wrong))
                assert self.sample.rows(reader.table(NAME)) == rows

    def test_sequences_cut_a_shard(self) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Streamable):
            pytest.skip("not Streamable")
        with open_simulated(SimulatedDisk()) as store:
            self.sample.write_all(self.sample.make(store), range(12))
            store.flush()
            info = info_of(store.port)
            schema, columns = kind.schema(info.options), kind.columns
            assert {columns.shard, columns.sequence, columns.payload} <= set(schema.names)
            source = kind.source(store.port, info)
            first, last = source.offsets("earliest"), source.offsets("latest")
            for shard, partition in enumerate(partitions_of(info)):
                for low, high in ((first[shard], last[shard]), (first[shard] + 1, last[shard] - 1)):
                    keys = kind.sequence_key(low), kind.sequence_key(high)
                    batches = [
                        kind.to_table_schema(batch, info.options, shard)
                        for batch in store.port.scan_arrow(partition, *keys)
                    ]
                    rows = pa.Table.from_batches(batches, schema)
                    assert rows.column(columns.sequence).to_pylist() == list(range(low, high))
                    assert set(rows.column(columns.shard).to_pylist()) <= {shard}

    # -- Queryable

    def test_queries_are_answered_everywhere(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Queryable):
            pytest.skip("not Queryable")
        assert self.sample.queries, "the sample must have queries: queries="
        with opened(tmp_path) as (store, client):
            self.sample.write_all(self.sample.make(store), range(30))
            store.flush()
            info = info_of(store.port)
            with store.snapshot() as here, client.snapshot() as there:
                self.sample.write_all(client.table(NAME), range(30, 40))  # a client sees its own writes
                for query in self.sample.queries:
                    for reading, numbers in (
                        (client.port, range(40)),
                        (store.port, range(40)),
                        (here._port, range(30)),
                        (there._port, range(30)),
                    ):
                        batches = list(reading.query(info, query.name, query.argument))
                        assert [row for batch in batches for row in batch.to_pylist()] == query.answer(numbers)

    def test_queries_are_checked_before_they_run(self, tmp_path: Path) -> None:
        kind = self.sample.kind
        with opened(tmp_path) as (store, client):
            self.sample.make(store)
            info = info_of(store.port)
            for reading in (store.port, client.port):
                if not isinstance(kind, Queryable):
                    with pytest.raises(KindMismatch):
                        reading.query(info, "balances", b"")
                    continue
                name = self.sample.queries[0].name
                for wrong in (("no such query", b""), (name, b"\xc1"), (name, bytes(QUERY_BYTES_MAX + 1))):
                    with pytest.raises(Invalid):
                        reading.query(info, *wrong)
                for timeout_s in (0.0, -1.0, float("nan"), 1e9):
                    with pytest.raises(Invalid):
                        reading.query(info, name, self.sample.queries[0].argument, timeout_s=timeout_s)

    def test_a_query_ends_at_its_deadline(self) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Queryable):
            pytest.skip("not Queryable")
        with open_simulated(SimulatedDisk()) as store:
            self.sample.write_all(self.sample.make(store), range(30))
            store.flush()
            info, query = info_of(store.port), self.sample.queries[0]
            with store.port.moment(partitions_of(info)) as moment, pytest.raises(WaitExpired):
                shards = [moment._state(partition) for partition in partitions_of(info)]
                arguments = (kind, info, query.name, query.argument, shards)
                batches = run_query(*arguments, lsn=moment.lsn, time_us=0, clock=HurriedClock(), timeout_s=1.0)
                list(batches)

    # -- Serviced

    def test_calls_that_change_nothing_may_be_repeated(self) -> None:
        kind = self.sample.kind
        if not isinstance(kind, Serviced):
            pytest.skip("not Serviced")
        assert kind.read_only_calls <= kind.repeatable_calls
