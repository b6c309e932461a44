"""The contract of `Port`: the same store in the owner and through the gateway.

The tests write; they share a store, and each creates its own tables.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.archive.chunk import ChunkIdentity
from penstock.errors import Closed, Invalid, KindMismatch, NotFound, PenstockError
from penstock.host.os_files import OsFileSystem
from penstock.journal.partitions import PartitionId
from penstock.kinds import Port, partitions_of
from penstock.kv.section import Rows
from penstock.kv.values import Options, encode_options
from penstock.lsm.rows import NEVER, PUT, Columns
from penstock.lsm.writer import SstableWriter
from penstock.partition.ledger_records import Condition, Verdict, encode_condition
from penstock.partition.pending import PendingGroup
from penstock.partition.reference import StagedFile, sealed
from penstock.queue.options import Retention, encode_queue_options, queue_options
from penstock.registry import QUEUE
from penstock.testing.contracts.reading import ABSENT, MESSAGES, make_kv, make_queue, rows_of, table_of


@dataclass
class OpenPort:
    """A port, and the folder of its store."""

    port: Port
    root: str
    identity: bytes
    close: Callable[[], None]


_numbers = itertools.count()


def _name() -> str:
    return f"t{next(_numbers)}"


def _group(rows: dict[PartitionId, dict[bytes, bytes]], condition: Condition | None = None) -> PendingGroup:
    group = PendingGroup(b"" if condition is None else encode_condition(condition))
    for partition, values in rows.items():
        group.sections[partition] = Rows.of(values)
    return group


class PortContract(ABC):
    """Tests of a `Port` into an empty store of kv tables and queues."""

    @abstractmethod
    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPort]:
        """A port that all tests share."""

    @abstractmethod
    @pytest.fixture
    def ending(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPort]:
        """A port that a test closes."""

    @pytest.fixture
    def port(self, opened: OpenPort) -> Port:
        """The port under test."""
        return opened.port

    # -- tables

    def test_a_table_is_made_once(self, port: Port) -> None:
        name = _name()
        assert port.table(name) is None
        info = make_kv(port, name, 3)
        assert (info.name, info.kind, info.shards) == (name, "kv", 3)
        assert make_kv(port, name, 3) == make_kv(port, name, 5) == make_queue(port, name) == info
        assert port.table(name) == info
        assert info in port.tables()
        assert [each.name for each in port.tables()] == sorted(each.name for each in port.tables())

    def test_a_table_that_cannot_be_is_refused(self, port: Port) -> None:
        before, options = port.tables(), encode_options(Options("bytes"))
        wrong: list[tuple[Any, Any, Any, Any]] = [
            ("Upper", "kv", 1, options),
            ("", "kv", 1, options),
            ("x" * 64, "kv", 1, options),
            (_name(), "nothing", 1, options),
            (_name(), "kv", 0, options),
            (_name(), "kv", -1, options),
            (_name(), "kv", 100_000, options),
            (_name(), "kv", 1, b"\xc1"),
            (_name(), "queue", 1, b"\xc1"),
        ]
        for name, kind, shards, table_options in wrong:
            with pytest.raises(Invalid):
                port.create(name, kind, shards, table_options)
        assert port.tables() == before

    def test_options_are_altered(self, port: Port) -> None:
        queue, table = make_queue(port, _name()), make_kv(port, _name())
        first, second = (encode_queue_options(queue_options(Retention(bytes_max=size))) for size in (1, 2))
        altered = port.alter(queue, first)
        assert (altered.options, altered.table_id, altered.created_lsn) == (first, queue.table_id, queue.created_lsn)
        assert port.table(queue.name) == altered
        assert altered in port.tables()
        assert port.alter(queue, second) == altered, "these were no longer its options"
        assert port.alter(altered, second).options == second
        for info, options in ((altered, b"\xc1"), (table, table.options)):
            with pytest.raises(Invalid):
                port.alter(info, options)
        port.drop(queue.name)
        with pytest.raises(NotFound):
            port.alter(altered, second)

    def test_a_dropped_table_is_gone(self, port: Port) -> None:
        name = _name()
        with pytest.raises(NotFound):
            port.drop(name)
        info = make_kv(port, name)
        (partition,) = partitions_of(info)
        table = table_of(port, info)
        table.put(b"a", b"1")
        events = make_queue(port, _name())
        for dropped in (name, events.name):
            port.drop(dropped)
            assert port.table(dropped) is None
        acts: list[Callable[[], object]] = [
            lambda: port.lookup(partition, b"a"),
            lambda: list(port.scan(partition, b"", None, False)),
            lambda: list(port.scan_arrow(partition, b"", None)),
            lambda: port.stage(partition, 1, 60.0),
            lambda: port.call(events, "bounds", b""),
            lambda: port.flush(table.put(b"b", b"2"), table=info.table_id),
            lambda: port.commit_and_wait(_group({partition: {b"b": b"2"}}), 100),
            lambda: port.drop(name),
        ]
        for act in acts:
            with pytest.raises(NotFound):
                act()
        again = make_kv(port, name)
        assert again.table_id > info.table_id
        assert port.lookup(partitions_of(again)[0], b"a") is None

    # -- writing

    def test_a_write_is_seen_by_its_writer_at_once(self, port: Port) -> None:
        info = make_kv(port, _name())
        (partition,), table = partitions_of(info), table_of(port, info)
        for number in range(20):
            table.put(b"key", b"%d" % number)
            assert port.lookup(partition, b"key") == b"%d" % number
        table.put(b"other", b"x")
        assert port.lookup_many(partition, [b"key", b"none", b"other"]) == [b"19", None, b"x"]
        table.put(b"other", b"y")
        assert list(port.scan(partition, b"", None, False)) == [(b"key", b"19"), (b"other", b"y")]
        table.delete(b"key")
        assert list(port.scan(partition, b"", None, True)) == [(b"other", b"y")]
        table.put(b"key", b"again")
        assert rows_of(port.scan_arrow(partition, b"", None)) == [(b"key", b"again"), (b"other", b"y")]
        table.put(b"last", b"z")
        with port.moment([partition]) as moment:
            assert moment.lookup(partition, b"last") == b"z"

    def test_epochs_rise_and_are_waited_for(self, port: Port) -> None:
        table = table_of(port, make_kv(port, _name()))
        epochs = [table.put(b"%d" % number, b"x") for number in range(50)]
        assert epochs == sorted(set(epochs))
        assert port.flush(epochs[10]).epoch >= epochs[10]
        assert port.flush(epochs[-1]).epoch >= epochs[-1]
        assert port.flush(None).epoch >= epochs[-1]
        assert port.flush(epochs[0]).epoch >= epochs[-1]

    @pytest.mark.parametrize("wrong", [1 << 71, 1, -1])
    def test_an_epoch_of_nobody_is_an_error(self, port: Port, wrong: int) -> None:
        table_of(port, make_kv(port, _name())).put(b"a", b"1")
        with pytest.raises(PenstockError):
            port.flush(wrong, 5.0)

    def test_a_group_is_seen_together(self, port: Port) -> None:
        one, other = (partitions_of(make_kv(port, _name()))[0] for _ in range(2))
        epoch = port.submit(_group({one: {b"a": b"1"}, other: {b"b": b"2"}}), 100)
        port.flush(epoch)
        with port.moment([one, other]) as moment:
            assert (moment.lookup(one, b"a"), moment.lookup(other, b"b")) == (b"1", b"2")

    def test_a_token_counts_once(self, port: Port) -> None:
        (partition,), producer = partitions_of(make_kv(port, _name())), _name()

        def commit(number: int, value: bytes) -> Verdict | None:
            group = _group({partition: {b"%d" % number: value}}, Condition((producer, number)))
            port.commit_and_wait(group, 100)
            return group.verdict

        assert not port.is_token_used((producer, 7))
        assert commit(7, b"first") is Verdict.ACCEPTED
        assert port.is_token_used((producer, 7))
        assert not port.is_token_used((producer, 6))
        assert commit(7, b"second") is Verdict.DUPLICATE
        assert commit(3, b"below") is Verdict.ACCEPTED
        assert commit(5_000, b"far") is Verdict.ACCEPTED
        assert commit(8, b"too old") is Verdict.TOKEN_TOO_OLD
        assert dict(port.scan(partition, b"", None, False)) == {b"7": b"first", b"3": b"below", b"5000": b"far"}

    def test_a_token_counts_without_a_section(self, port: Port) -> None:
        verdicts, token = [], (_name(), 1)
        for _ in range(2):
            group = _group({}, Condition(token))
            port.commit_and_wait(group, 0)
            verdicts.append(group.verdict)
        assert verdicts == [Verdict.ACCEPTED, Verdict.DUPLICATE]

    def test_a_condition_decides(self, port: Port) -> None:
        (partition,), events = partitions_of(make_kv(port, _name())), make_queue(port, _name())
        table_of(port, events).put_many(MESSAGES[:10])
        port.flush(None)

        def move(start: int, end: int, key: bytes) -> Verdict | None:
            moved = QUEUE.move(events, "stream", [(0, start, end)])
            group = _group({partition: {key: b"written"}}, Condition(None, (moved,)))
            port.commit_and_wait(group, 100)
            return group.verdict

        assert move(1, 5, b"first") is Verdict.ACCEPTED
        assert move(1, 5, b"again") is Verdict.DUPLICATE
        assert move(3, 8, b"gap") is Verdict.REFUSED
        assert move(5, 8, b"next") is Verdict.ACCEPTED
        assert dict(port.scan(partition, b"", None, False)) == {b"first": b"written", b"next": b"written"}

    def test_a_condition_that_cannot_be_judged_is_refused(self, port: Port) -> None:
        info = make_kv(port, _name())
        (partition,) = partitions_of(info)
        for name, argument in (
            ("nothing", info.table_id.to_bytes(8, "big")),
            ("queue.move", info.table_id.to_bytes(8, "big") + b"\xc1"),
            ("queue.move", make_queue(port, _name()).table_id.to_bytes(8, "big") + b"\xc1"),
        ):
            with pytest.raises(Invalid):
                port.commit_and_wait(_group({partition: {b"a": b"1"}}, Condition(None, ((name, argument),))), 100)
        with pytest.raises(NotFound):
            port.commit_and_wait(
                _group({partition: {b"a": b"1"}}, Condition(None, (("queue.move", b"\xff" * 9),))), 100
            )
        assert port.lookup(partition, b"a") is None

    def test_a_section_for_nobody_is_refused(self, port: Port) -> None:
        (partition,) = partitions_of(make_kv(port, _name()))
        for absent in (ABSENT, PartitionId(partition + 1)):
            with pytest.raises((NotFound, Invalid)):
                port.commit_and_wait(_group({partition: {b"a": b"1"}, absent: {b"b": b"2"}}), 100)
        assert port.lookup(partition, b"a") is None

    def test_writers_do_not_disturb_each_other(self, port: Port) -> None:
        info = make_kv(port, _name(), 2)
        table, errors = table_of(port, info), list[BaseException]()

        def write(writer: int) -> None:
            try:
                for number in range(100):
                    epoch = table.put(b"%d/%d" % (writer, number), b"x")
                port.flush(epoch)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert sum(len(list(port.scan(partition, b"", None, False))) for partition in partitions_of(info)) == 400

    def test_a_moment_lies_between_two_groups(self, port: Port) -> None:
        shards = partitions_of(make_kv(port, _name(), 2))
        ended, errors = threading.Event(), list[BaseException]()

        def write() -> None:
            try:
                for number in itertools.count():
                    if ended.is_set():
                        return
                    port.submit(_group({shard: {b"n": b"%d" % number} for shard in shards}), 100)
                    if number % 16 == 0:
                        port.flush(None)
            except BaseException as error:
                errors.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(30):
                with port.moment(shards) as moment:
                    assert len({moment.lookup(shard, b"n") for shard in shards}) == 1
                snapshot = port.snapshot()
                assert len({snapshot.lookup(shard, b"n") for shard in shards}) == 1
                snapshot.close()
        finally:
            ended.set()
            writer.join(60)
        assert errors == []

    # -- snapshots

    def test_a_snapshot_does_not_move(self, port: Port) -> None:
        info, doomed = make_kv(port, _name()), make_kv(port, _name())
        (partition,), table = partitions_of(info), table_of(port, info)
        table_of(port, doomed).put(b"a", b"kept")
        table.put(b"a", b"1")
        port.flush(None)
        snapshot = port.snapshot()
        table.put(b"a", b"2")
        table.put(b"b", b"2")
        port.drop(doomed.name)
        new = make_kv(port, _name())
        port.flush(None)
        assert list(snapshot.scan(partition, b"", None, False)) == [(b"a", b"1")]
        assert snapshot.lookup(partitions_of(doomed)[0], b"a") == b"kept"
        assert snapshot.table(doomed.name) == doomed
        assert snapshot.table(new.name) is None
        with pytest.raises(NotFound):
            snapshot.lookup(partitions_of(new)[0], b"a")
        later = port.snapshot()
        assert later.lsn > snapshot.lsn
        assert later.time_us() >= snapshot.time_us()
        assert later.table(doomed.name) is None
        assert dict(later.scan(partition, b"", None, False)) == {b"a": b"2", b"b": b"2"}
        later.close()
        snapshot.close()

    def test_a_closed_snapshot_says_so(self, port: Port) -> None:
        info = make_kv(port, _name())
        (partition,) = partitions_of(info)
        table_of(port, info).put(b"a", b"1")
        port.flush(None)
        snapshot, other = port.snapshot(), port.snapshot()
        snapshot.close()
        snapshot.close()
        acts: list[Callable[[], object]] = [
            lambda: snapshot.lookup(partition, b"a"),
            lambda: snapshot.lookup_many(partition, [b"a", b"b"]),
            lambda: list(snapshot.scan(partition, b"", None, False)),
            lambda: list(snapshot.scan_arrow(partition, b"", None)),
            lambda: snapshot.pieces(partition, 1),
        ]
        for act in acts:
            with pytest.raises(Closed):
                act()
        assert other.lookup(partition, b"a") == b"1"
        other.close()

    # -- files that another process built

    def _build(self, opened: OpenPort, file: StagedFile, rows: dict[bytes, bytes]) -> StagedFile:
        """Build an sstable, as another process does."""
        keys = sorted(rows)
        whole = Columns.of(
            keys,
            [rows[key] for key in keys],
            np.ones(len(keys), np.uint64),
            np.full(len(keys), PUT, np.uint8),
            np.full(len(keys), NEVER, np.int64),
        )
        identity = ChunkIdentity(store=opened.identity, chunk_id=file.chunk_id)
        writer = SstableWriter(OsFileSystem(), f"{opened.root}/{file.file_name}", identity)
        writer.append(whole)
        writer.finish()
        return sealed(OsFileSystem(), opened.root, file)

    def test_files_are_staged_and_accepted(self, opened: OpenPort) -> None:
        port = opened.port
        info = make_kv(port, _name())
        (partition,), table, producer = partitions_of(info), table_of(port, info), _name()
        table.put(b"a", b"old")
        staged = port.stage(partition, 2, 60.0)
        assert len({file.chunk_id for file in staged} | {file.file_name for file in staged}) == 4
        files = [
            self._build(opened, staged[0], {b"a": b"1", b"b": b"2"}),
            self._build(opened, staged[1], {b"c": b"3"}),
        ]
        for expected in (Verdict.ACCEPTED, Verdict.DUPLICATE):
            group = PendingGroup(encode_condition(Condition((producer, 1))))
            if not port.is_token_used((producer, 1)):
                port.accept(group, partition, files)
            port.commit_and_wait(group, 100)
            assert group.verdict is expected
        assert dict(port.scan(partition, b"", None, False)) == {b"a": b"1", b"b": b"2", b"c": b"3"}

    def test_files_that_are_not_what_was_staged_are_refused(self, opened: OpenPort) -> None:
        port = opened.port
        info, other = make_kv(port, _name(), 2), make_kv(port, _name())
        partition = partitions_of(info)[0]
        built, unbuilt = port.stage(partition, 2, 60.0)
        good = self._build(opened, built, {b"a": b"1"})
        wrong = [
            unbuilt,
            StagedFile(good.chunk_id, good.file_name, good.size_bytes, bytes(32)),
            StagedFile(good.chunk_id, good.file_name, good.size_bytes + 1, good.digest),
            StagedFile(999_999, good.file_name, good.size_bytes, good.digest),
            StagedFile(good.chunk_id, "../STORE", good.size_bytes, good.digest),
        ]

        def commit_and_wait(target: PartitionId, file: StagedFile) -> None:
            group = PendingGroup()
            port.accept(group, target, [file])
            port.commit_and_wait(group, 100)

        for file in wrong:
            with pytest.raises(Invalid):
                commit_and_wait(partition, file)
        with pytest.raises(Invalid):
            commit_and_wait(partitions_of(other)[0], good)  # of another table
        for absent in (ABSENT, PartitionId(partition + 2)):
            with pytest.raises((NotFound, Invalid)):
                commit_and_wait(absent, good)
        assert list(port.scan(partition, b"", None, False)) == []
        commit_and_wait(partition, good)
        assert list(port.scan(partition, b"", None, False)) == [(b"a", b"1")]
        with pytest.raises(Invalid):
            commit_and_wait(partition, good)  # the table has adopted it already

    def test_staging_has_limits(self, port: Port) -> None:
        (partition,) = partitions_of(make_kv(port, _name()))
        for count, lease_s in ((0, 60.0), (-1, 60.0), (1 << 20, 60.0), (1, 0.0), (1, -1.0), (1, float("nan"))):
            with pytest.raises(Invalid):
                port.stage(partition, count, lease_s)
        for absent in (ABSENT, PartitionId(partition + 1)):
            with pytest.raises(NotFound):
                port.stage(absent, 1, 60.0)

    # -- services, time

    def test_a_call_that_a_kind_does_not_know_is_refused(self, port: Port) -> None:
        for info, error in ((make_kv(port, _name()), KindMismatch), (make_queue(port, _name()), Invalid)):
            for name, argument in (("nothing", b""), ("nothing", b"\xc1"), ("", b"x")):
                with pytest.raises(error):
                    port.call(info, name, argument)

    def test_time_does_not_go_back(self, port: Port) -> None:
        times = [port.time_us() for _ in range(5)]
        assert times == sorted(times)

    # -- closing

    def test_a_closed_port_says_so(self, ending: OpenPort) -> None:
        """Except `flush`, which may still report the progress of writes."""
        port = ending.port
        info = make_kv(port, "t")
        (partition,), table = partitions_of(info), table_of(port, info)
        table.put(b"a", b"1")
        events = make_queue(port, "q")
        ending.close()

        def moment() -> None:
            with port.moment([partition]):
                pass

        acts: list[Callable[[], object]] = [
            lambda: port.table("t"),
            port.tables,
            lambda: port.lookup(partition, b"a"),
            lambda: port.lookup_many(partition, [b"a", b"b"]),
            lambda: list(port.scan(partition, b"", None, False)),
            lambda: list(port.scan_arrow(partition, b"", None)),
            moment,
            port.time_us,
            lambda: table.put(b"b", b"2"),
            lambda: port.submit(_group({partition: {b"b": b"2"}}), 100),
            lambda: port.commit_and_wait(_group({partition: {b"b": b"2"}}), 100),
            lambda: port.call(events, "bounds", b""),
            lambda: make_kv(port, "u"),
            lambda: port.drop("t"),
            lambda: port.stage(partition, 1, 60.0),
            lambda: port.is_token_used(("p", 1)),
            port.snapshot,
        ]
        for number, act in enumerate(acts):
            try:
                act()
            except Closed:
                continue
            pytest.fail(f"call {number} was answered after the end")
        ending.close()
