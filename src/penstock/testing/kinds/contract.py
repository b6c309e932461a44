"""What every kind of table must pass.

Each test states one promise; random seeds are fixed. Local tests run on a simulated disk, so that they can include
crashes; tests through the owner's socket run in a real folder.

Thread: a test's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptionError, Invalid, KindMismatch, NotFound
from penstock.host import threads
from penstock.kinds import (
    Kind,
    as_loadable,
    as_queryable,
    as_replaceable,
    as_serviced,
    as_streamable,
    partitions_of,
)
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.registry import find_kind
from penstock.store.store import Store
from penstock.testing.disk import SimulatedDisk
from penstock.testing.kinds.abilities import AbilityContract
from penstock.testing.kinds.sample import NAME, SHARDS, KindSample, info_of, open_simulated, opened, scanned

MUTATIONS = 60  # of each section


class KindContract(AbilityContract):
    """The whole suite. A subclass sets the kind: `sample`."""

    sample: KindSample

    @property
    def kind(self) -> Kind:
        return self.sample.kind

    # -- the core

    def test_it_is_registered(self) -> None:
        assert type(find_kind(self.kind.name)) is type(self.kind)

    def test_what_it_cannot_do_is_one_clear_line(self) -> None:
        info = TableInfo(2, NAME, self.kind.name, 1, self.kind.options_default, 1)
        casts: list[Callable[[Kind, TableInfo], Any]] = [as_streamable, as_loadable, as_replaceable]
        for cast in [*casts, as_queryable, as_serviced]:
            line = ""
            try:
                assert cast(self.kind, info) is self.kind
            except KindMismatch as error:
                line = str(error)
            assert not line or line.startswith(f"table {NAME} is of the kind {self.kind.name}, which ")
            assert len(line.splitlines()) <= 1

    def test_conditions_that_it_lacks_are_refused(self) -> None:
        info = TableInfo(2, NAME, self.kind.name, 1, self.kind.options_default, 1)
        with pytest.raises(Invalid):
            self.kind.check_condition(info, "no such condition", bytes(8), own=True)

    def test_options_are_checked(self, tmp_path: Path) -> None:
        self.kind.check_options(self.kind.options_default)
        with pytest.raises(Invalid):
            self.kind.check_options(b"\xc1")  # no encoder writes this
        with opened(tmp_path) as stores:
            for store in stores:
                with pytest.raises(Invalid):
                    store.create(NAME, self.kind.name, options=b"\xc1")
                assert store.tables() == []

    # -- sections

    def test_sections_survive_their_bytes(self) -> None:
        for section in self.sample.sections:
            payload = self.kind.encode(section)
            assert self.kind.encode(self.kind.decode(payload)) == payload
            copy = self.kind.receive(payload, self.kind.options_default)
            assert self.kind.encode(copy) == payload
            assert len(copy) >= 0  # a section counts its rows
            assert self.kind.weight(payload) >= len(payload)

    def test_sections_that_break_a_rule_are_refused(self) -> None:
        for payload in self.sample.refused:
            with pytest.raises(Invalid):
                self.kind.receive(payload, self.kind.options_default)

    def _mutants(self) -> Iterator[bytes]:
        """Yield payloads with a few bytes changed, removed or added."""
        chance = random.Random(13)
        for section in self.sample.sections:
            payload = self.kind.encode(section)
            for _ in range(MUTATIONS):
                data = bytearray(payload)
                for _ in range(chance.randint(1, 3)):
                    data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
                cut = chance.choice((len(data), len(data), chance.randrange(len(data) + 1)))
                yield bytes(data[:cut]) + chance.randbytes(chance.choice((0, 0, 0, 5)))
        yield from (b"", b"\0", b"\xff" * 40, chance.randbytes(100))

    def test_damaged_sections_raise_one_error(self) -> None:
        refused = 0
        for payload in self._mutants():
            assert self.kind.weight(payload) >= 0
            try:
                self.kind.decode(payload)
            except CorruptionError:
                refused += 1
            try:
                self.kind.receive(payload, self.kind.options_default)
            except Invalid:
                refused += 1
        assert refused

    def test_apply_is_total(self) -> None:
        """Every section that `receive` and `admit` pass can be applied, now and at a replay; nothing is set aside."""
        disk = SimulatedDisk()
        store = open_simulated(disk)
        self.sample.make(store)
        payloads = [self.kind.encode(section) for section in self.sample.sections]
        applied = 0
        for number, payload in enumerate([*payloads, *self._mutants()]):
            group = PendingGroup()
            try:
                section = self.kind.receive(payload, self.kind.options_default)
                group.sections[partitions_of(info_of(store.port))[number % SHARDS]] = section
                store.port.submit(group, len(payload))
            except Invalid:
                continue
            applied += 1
        store.flush()
        assert applied >= len(payloads)
        assert store.troubles() == []
        before = scanned(self.kind, store.port)
        with open_simulated(disk.image().restore("strict")) as again:
            assert again.troubles() == []
            assert scanned(self.kind, again.port).equals(before)

    def test_sections_of_one_record_are_applied_in_order(self) -> None:
        """One record with all sections of a shard gives the same content as one record for each section."""
        contents: list[Any] = []
        for together in (True, False):
            with open_simulated(SimulatedDisk()) as store:
                table, partition = self.sample.make(store), partitions_of(info_of(store.port))[0]
                payloads = [self.kind.encode(section) for section in self.sample.sections]
                sections = [self.kind.decode(payload) for payload in payloads]
                for record in [sections] if together else [[section] for section in sections]:
                    group = PendingGroup()
                    group.sections[partition] = tuple(record)
                    store.flush(store.port.submit(group, sum(map(len, payloads))))
                contents.append(self.sample.rows(table))
        assert contents[0] == contents[1]

    # -- state

    def _filled(self, disk: SimulatedDisk, numbers: range) -> Store:
        store = open_simulated(disk)
        self.sample.write_all(self.sample.make(store), numbers)
        store.flush()
        return store

    def test_what_is_written_is_read(self) -> None:
        with self._filled(SimulatedDisk(), range(20)) as store:
            table = store.table(NAME)
            assert table.name == NAME
            assert self.sample.rows(table) == self.sample.expected(range(20))
            rows = scanned(self.kind, store.port)
            assert rows.schema.equals(self.kind.schema(self.kind.options_default))
            assert rows.num_rows

    def test_it_is_there_after_a_close(self) -> None:
        disk = SimulatedDisk()
        with self._filled(disk, range(20)) as store:
            store.checkpoint()
            self.sample.write_all(store.table(NAME), range(20, 30))
        with open_simulated(disk) as store:
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(range(30))

    def test_a_replay_gives_the_same_state(self) -> None:
        disk = SimulatedDisk()
        store = self._filled(disk, range(20))
        store.checkpoint()
        self.sample.write_all(store.table(NAME), range(20, 40))
        store.flush()
        before = scanned(self.kind, store.port)
        for _ in range(2):
            disk = disk.image().restore("strict")
            store = open_simulated(disk)
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(range(40))
            assert scanned(self.kind, store.port).equals(before)

    def test_two_stores_apply_the_same(self) -> None:
        """Apply depends on the records alone, not on when memtables were flushed or files written."""
        with self._filled(SimulatedDisk(), range(30)) as one, open_simulated(SimulatedDisk()) as other:
            table = self.sample.make(other)
            for number in range(30):
                self.sample.write(table, number)
            other.flush()
            other.checkpoint()
            assert scanned(self.kind, one.port).equals(scanned(self.kind, other.port))

    def test_a_dropped_table_is_gone(self) -> None:
        disk = SimulatedDisk()
        with self._filled(disk, range(5)) as store:
            store.drop(NAME)
            with pytest.raises(NotFound):
                store.table(NAME)
            assert self.sample.rows(self.sample.make(store)) == self.sample.expected(())
        with open_simulated(disk) as store:
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(())

    # -- snapshots and batches

    def test_a_snapshot_stays_as_it_is(self) -> None:
        with self._filled(SimulatedDisk(), range(10)) as store, store.snapshot() as early:
            self.sample.write_all(store.table(NAME), range(10, 20))
            store.flush()
            store.checkpoint()
            assert self.sample.rows(early.table(NAME)) == self.sample.expected(range(10))
            with store.snapshot() as late:
                assert self.sample.rows(late.table(NAME)) == self.sample.expected(range(20))

    def test_a_batch_happens_as_a_whole_and_once(self) -> None:
        with self._filled(SimulatedDisk(), range(5)) as store:
            with pytest.raises(ZeroDivisionError), store.batch() as batch:
                self.sample.write(batch.table(NAME), 5)
                raise ZeroDivisionError
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(range(5))
            for duplicate in (False, True):
                with store.batch(token=("contract", 1)) as batch:
                    self.sample.write_all(batch.table(NAME), range(5, 8))
                assert batch.duplicate is duplicate
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(range(8))

    def test_readers_see_whole_batches(self, tmp_path: Path) -> None:
        with opened(tmp_path) as (store, client):
            for name in ("one", "other"):
                self.sample.make(store, name)

            def write() -> None:
                for number in range(20):
                    with store.batch() as batch:
                        for name in ("one", "other"):
                            self.sample.write(batch.table(name), number)

            writer = threads.spawn(write, name="contract-writer")
            row_counts: list[int] = []
            while writer.is_alive() or not row_counts:
                for reading in (store, client):
                    with reading.snapshot() as snapshot:
                        rows = [self.sample.rows(snapshot.table(name)) for name in ("one", "other")]
                        assert rows[0] == rows[1]
                        row_counts.append(len(rows[0]))
            writer.join()
            for reading in (store, client):
                assert self.sample.rows(reading.table("one")) == self.sample.expected(range(20))

    # -- through the owner's socket

    def test_a_client_reads_and_writes_the_same(self, tmp_path: Path) -> None:
        with opened(tmp_path) as (store, client):
            self.sample.write_all(self.sample.make(client), range(6))
            assert self.sample.rows(client.table(NAME)) == self.sample.expected(range(6))  # a client sees its writes
            self.sample.write_all(store.table(NAME), range(6, 9))
            store.flush()
            with client.batch(token=("contract", 1)) as batch:
                self.sample.write_all(batch.table(NAME), range(9, 12))
            for reading in (store, client):
                assert self.sample.rows(reading.table(NAME)) == self.sample.expected(range(12))
                with reading.snapshot() as snapshot:
                    assert self.sample.rows(snapshot.table(NAME)) == self.sample.expected(range(12))
            assert scanned(self.kind, client.port).equals(scanned(self.kind, store.port))
            with client.snapshot() as snapshot:
                pieces = [batch for piece in snapshot.pieces(NAME, 5) for batch in snapshot.read(piece)]
                assert sum(batch.num_rows for batch in pieces) == scanned(self.kind, store.port).num_rows

    def test_a_client_is_refused_what_breaks_a_rule(self, tmp_path: Path) -> None:
        class Damaged(type(self.kind)):  # type: ignore[misc]
            """Sends `payload` instead of any section."""

            payload = b""

            def encode(self, section: Any) -> bytes:
                return self.payload

        with opened(tmp_path) as (store, client):
            self.sample.make(client)
            info = info_of(client.port)
            damaged = Damaged()
            client.port._kinds[info.table_id] = damaged
            for payload in self.sample.refused:
                damaged.payload = payload
                group = PendingGroup()
                group.sections[partitions_of(info)[0]] = self.sample.sections[0]
                with pytest.raises(Invalid):
                    client.port.commit_and_wait(group, len(payload))
            assert self.sample.rows(store.table(NAME)) == self.sample.expected(())
