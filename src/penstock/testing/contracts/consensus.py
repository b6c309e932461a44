"""The contract of `Consensus`: order, durability before an answer, poison after a failure, truncation, reopening.

A `ConsensusBench` provides what tests need beyond the protocol: a crash, a failing disk, a full disk.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from penstock.errors import Closed, DiskFull, Invalid, NotFound, PenstockError, Poisoned
from penstock.journal.consensus import Consensus

FAILURES = (PenstockError, OSError)


class ConsensusBench(ABC):
    """One sequence of records and its disk, with crashes and faults."""

    @abstractmethod
    def open(self) -> Consensus:
        """Open the sequence, again after `close` or `crash`: the same records, another incarnation."""

    @abstractmethod
    def crash(self) -> None:
        """End without a `close`; records that are not durable are lost, if the implementation can lose them."""

    @abstractmethod
    def failing(self) -> AbstractContextManager[None]:
        """Return a context in which no record becomes durable: writing or syncing it fails."""

    @abstractmethod
    def full(self) -> AbstractContextManager[None]:
        """Return a context in which there is no room for another record."""


def _all(consensus: Consensus, start: int = 1) -> list[tuple[int, bytes]]:
    return [(int(lsn), body) for lsn, body in consensus.records(start)]


class ConsensusContract(ABC):
    """Tests of a consensus. Its segments hold at least a few hundred bytes each."""

    @abstractmethod
    @pytest.fixture
    def bench(self, tmp_path: Path) -> ConsensusBench:
        """An empty sequence."""

    @pytest.fixture
    def consensus(self, bench: ConsensusBench) -> Iterator[Consensus]:
        """The sequence, opened."""
        opened = bench.open()
        yield opened
        opened.close()

    def test_it_begins_empty(self, consensus: Consensus) -> None:
        assert (consensus.first, consensus.committed, consensus.barrier()) == (1, 0, 0)
        assert _all(consensus) == []
        assert consensus.incarnation >= 1
        assert consensus.is_leader
        assert consensus.durability in ("disk", "quorum")

    def test_lsns_follow_each_other(self, consensus: Consensus) -> None:
        assert consensus.propose([b"one"]) == 1
        assert consensus.propose([b"two", b"three", b""]) == 4
        assert consensus.propose([b"x" * (1 << 20)]) == 5
        assert consensus.committed == 5
        bodies = [b"one", b"two", b"three", b"", b"x" * (1 << 20)]
        assert _all(consensus) == list(enumerate(bodies, 1))
        assert _all(consensus, 3) == list(enumerate(bodies, 1))[2:]
        assert _all(consensus, 6) == []

    def test_a_proposal_holds_records(self, consensus: Consensus) -> None:
        consensus.propose([b"one"])
        with pytest.raises(Invalid):
            consensus.propose([])
        with pytest.raises(Invalid):
            consensus.propose([b"good", "text"])  # type: ignore[list-item]
        assert _all(consensus) == [(1, b"one")]
        assert consensus.propose([b"two"]) == 2

    def test_what_was_told_is_durable(self, bench: ConsensusBench) -> None:
        acknowledged: list[tuple[int, bytes]] = []
        for crash in range(3):
            consensus = bench.open()
            assert _all(consensus) == acknowledged
            assert consensus.committed == len(acknowledged)
            for number in range(3):
                body = b"%d of %d" % (number, crash)
                acknowledged.append((consensus.propose([body]), body))
            bench.crash()
        consensus = bench.open()
        assert _all(consensus) == acknowledged
        consensus.close()

    def test_a_barrier_is_at_or_past_what_was_told(self, consensus: Consensus) -> None:
        for _ in range(3):
            lsn = consensus.propose([b"x"])
            assert consensus.barrier() >= lsn

    def test_it_goes_on_where_it_was_closed(self, bench: ConsensusBench) -> None:
        incarnations = []
        for number in range(1, 4):
            consensus = bench.open()
            incarnations.append(consensus.incarnation)
            assert consensus.propose([b"x"]) == number
            consensus.close()
            consensus.close()
        bench.open().close()
        assert incarnations == sorted(set(incarnations))

    @pytest.mark.parametrize("end", ["close", "crash"])
    def test_an_incarnation_is_used_once(self, bench: ConsensusBench, end: str) -> None:
        """Even if nothing was written in it."""
        incarnations: list[int] = []
        for _ in range(4):
            consensus = bench.open()
            incarnations.append(consensus.incarnation)
            consensus.propose([b"x"])
            consensus.close() if end == "close" else bench.crash()
        assert incarnations == sorted(set(incarnations))

    def test_a_failure_poisons_until_it_recovers(self, bench: ConsensusBench) -> None:
        consensus = bench.open()
        consensus.propose([b"told"])
        before = consensus.incarnation
        with bench.failing(), pytest.raises(FAILURES):
            consensus.propose([b"failed", b"failed too"])
        assert (consensus.committed, consensus.barrier()) == (1, 1)
        for act in (lambda: consensus.propose([b"later"]), consensus.roll, lambda: consensus.truncate(1)):
            with pytest.raises(Poisoned):
                act()  # the disk works again, but nothing is retried
        assert _all(consensus) == [(1, b"told")]
        consensus.recover()
        assert consensus.incarnation > before
        assert consensus.propose([b"again"]) == 2
        assert _all(consensus) == [(1, b"told"), (2, b"again")]
        bench.crash()
        consensus = bench.open()
        assert _all(consensus) == [(1, b"told"), (2, b"again")]
        consensus.close()

    def test_a_failed_recovery_leaves_it_poisoned(self, bench: ConsensusBench) -> None:
        consensus = bench.open()
        consensus.propose([b"told"])
        with bench.failing():
            with pytest.raises(FAILURES):
                consensus.propose([b"failed"])
            with pytest.raises(FAILURES):
                consensus.recover()
        with pytest.raises(Poisoned):
            consensus.propose([b"later"])
        consensus.recover()
        assert consensus.propose([b"again"]) == 2
        consensus.close()
        consensus = bench.open()
        assert _all(consensus) == [(1, b"told"), (2, b"again")]
        consensus.close()

    def test_a_failed_record_does_not_come_back(self, bench: ConsensusBench) -> None:
        """It may exist after a crash, because there was no answer; but then it stays, and keeps its LSN."""
        consensus = bench.open()
        consensus.propose([b"told"])
        with bench.failing(), pytest.raises(FAILURES):
            consensus.propose([b"failed"])
        bench.crash()
        consensus = bench.open()
        records = _all(consensus)
        assert records in ([(1, b"told")], [(1, b"told"), (2, b"failed")])
        assert consensus.propose([b"next"]) == len(records) + 1
        bench.crash()
        consensus = bench.open()
        assert _all(consensus) == [*records, (len(records) + 1, b"next")]
        consensus.close()

    def test_recovery_of_what_is_well_changes_nothing(self, consensus: Consensus) -> None:
        consensus.propose([b"one"])
        consensus.recover()
        assert consensus.propose([b"two"]) == 2
        assert _all(consensus) == [(1, b"one"), (2, b"two")]

    def test_a_full_disk_does_not_poison(self, bench: ConsensusBench) -> None:
        consensus = bench.open()
        consensus.propose([b"one"])
        with bench.full():
            for _ in range(2):
                with pytest.raises(DiskFull):
                    consensus.propose([b"x" * (1 << 20)])
        assert consensus.propose([b"two"]) == 2
        assert _all(consensus) == [(1, b"one"), (2, b"two")]
        consensus.close()

    # -- truncation

    def test_segments_are_given_up_as_a_whole(self, consensus: Consensus) -> None:
        for number in range(1, 10):
            consensus.propose([b"%d" % number])
            if number % 3 == 0:
                consensus.roll()
        consensus.roll()  # nothing was proposed since the last roll
        starts = consensus.segment_starts()
        assert starts == [1, 4, 7, 10]
        assert consensus.truncate(0) == consensus.truncate(1) == consensus.truncate(3) == 1
        assert consensus.truncate(5) == 4
        assert (consensus.first, consensus.segment_starts(), consensus.committed) == (4, [4, 7, 10], 9)
        assert _all(consensus, 4) == [(number, b"%d" % number) for number in range(4, 10)]
        with pytest.raises(NotFound):
            _all(consensus, 3)
        assert consensus.truncate(4) == 4
        with pytest.raises(Invalid):
            consensus.truncate(11)
        assert consensus.truncate(10) == 10
        assert (_all(consensus, 10), consensus.committed) == ([], 9)
        assert consensus.propose([b"10"]) == 10

    @pytest.mark.parametrize("end", ["close", "crash"])
    @pytest.mark.parametrize("before", [4, 7])
    def test_a_truncation_is_for_good(self, bench: ConsensusBench, end: str, before: int) -> None:
        """Even a truncation of everything: LSNs continue."""
        consensus = bench.open()
        for number in range(1, 7):
            consensus.propose([b"%d" % number])
            if number % 3 == 0:
                consensus.roll()
        assert consensus.truncate(before) == before
        consensus.close() if end == "close" else bench.crash()
        consensus = bench.open()
        assert (consensus.first, consensus.committed) == (before, 6)
        assert consensus.propose([b"7"]) == 7
        assert _all(consensus, before) == [(number, b"%d" % number) for number in range(before, 8)]
        consensus.close()

    def test_truncation_comes_from_another_thread(self, consensus: Consensus) -> None:
        ended, errors = threading.Event(), list[BaseException]()

        def truncate() -> None:
            try:
                while not ended.is_set():
                    first = consensus.truncate(max(1, consensus.committed - 20))
                    for lsn, body in consensus.records(first):
                        assert body == b"%d" % lsn
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=truncate)
        thread.start()
        try:
            for number in range(1, 301):
                assert consensus.propose([b"%d" % number]) == number
                if number % 7 == 0:
                    consensus.roll()
        finally:
            ended.set()
            thread.join(60)
        assert errors == []
        assert consensus.committed == 300

    # -- closing

    def test_a_closed_one_says_so(self, bench: ConsensusBench) -> None:
        consensus = bench.open()
        consensus.propose([b"one"])
        consensus.close()
        acts: list[Callable[[], object]] = [
            lambda: consensus.propose([b"two"]),
            consensus.roll,
            lambda: consensus.truncate(1),
            consensus.recover,
            lambda: _all(consensus),
        ]
        for act in acts:
            with pytest.raises(Closed):
                act()
        consensus = bench.open()
        assert _all(consensus) == [(1, b"one")]
        consensus.close()
