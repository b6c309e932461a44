"""Negative controls: each seeded bug must be caught by the log's crash suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from log_scenario import LogScenario, User
from shared import Patch, fsync_retried, no_directory_fsync, seeded
from test_log_crashes import (
    check_rot,
    explore_failed_syncs,
    replaced_segments,
)
from test_log_crashes import (
    test_dead_segment_that_could_not_be_unlinked_stays_dead as dead_segments,
)

import penstock.log.log as log_module
import penstock.log.record as record_module
import penstock.testing.disk_files as disk_module
from penstock.host.files import Buffer
from penstock.log import Index, Log, Record
from penstock.log.segment import HEADER_BYTES, SegmentReader, SegmentTail, SegmentWriter, scan_tail
from penstock.testing import Faults, History, SimulatedDisk, explore


def crashes() -> None:
    explore(LogScenario())


def first_crashes() -> None:
    explore(LogScenario(), depth=1)


class TornTail(LogScenario):
    """A last batch that may tear so that its first record is bad and a later one whole."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = User(self.open(disk, 1), history, "a")
        user.append(50)
        user.sync()
        user.append(440, 440, 440)


def torn_tails() -> None:
    explore(TornTail(), modes=("torn",), recovery_modes=("strict", "kept"), torn_seeds=20)


def short_writes() -> None:
    explore(LogScenario(), depth=1, faults=Faults(kinds=("short",), images_every=3))


def failed_syncs() -> None:
    explore_failed_syncs(LogScenario())


def rename_without_fsync(patch: Patch) -> None:
    fsync = disk_module.SimulatedFile.fsync
    patch.setattr(disk_module.SimulatedFile, "fsync", lambda f: None if f.path.endswith(".tmp") else fsync(f))


def tail_not_truncated(patch: Patch) -> None:
    """Goes on in the old segment after the last sound record, over whatever stands there."""
    create = Log._create

    def in_place(self: Log, first: int, *, cut: bool, tail: Sequence[Record] = ()) -> SegmentWriter:
        if self._active is not None or not self._chain or self.last:
            return create(self, first, cut=cut, tail=tail)
        reader: SegmentReader = self.open_segment(self._chain[-1])
        if reader.sparse_index() is not None:
            return create(self, first, cut=cut, tail=tail)
        file = self._fs.open(reader.file.path, write=True)
        segment = SegmentWriter(file, reader.header, allocate_bytes=512, index_bytes=128)
        segment.index.add(reader.header.first, HEADER_BYTES)
        segment.end = scan_tail(reader).end
        segment.claimed = file.size()
        self.synced = self.last = Index(scan_tail(reader).last)
        segment.file.fsync()
        return segment

    patch.setattr(Log, "_create", in_place)


def failed_bytes_trusted(patch: Patch) -> None:
    """Opening syncs the old file and takes all of it for durable."""

    def trusting(reader: SegmentReader) -> SegmentTail:
        tail = scan_tail(reader)
        reader.file.fsync()
        return SegmentTail(unsynced=[], synced=tail.last, end=tail.end, seal=tail.seal, torn=tail.torn)

    patch.setattr(log_module, "scan_tail", trusting)


def short_write_ignored(patch: Patch) -> None:
    def once(write_some: Callable[[memoryview, int], int], data: Buffer, offset: int) -> None:
        write_some(memoryview(data), offset)

    patch.setattr(disk_module, "write_fully", once)


def length_not_covered(patch: Patch) -> None:
    whole = record_module.checksum

    def uncovered(salt: int, *covered: bytes) -> int:
        return whole(salt, covered[0][4:], *covered[1:])

    def encode(
        bodies: Sequence[bytes], *, salt: int, incarnation: int, first: int, synced: int, kind: int = 16, flags: int = 0
    ) -> list[bytes]:
        pieces = []
        for index, body in enumerate(bodies, first):
            rest = record_module._REST.pack(len(body), kind, flags, 0, incarnation, index, synced)
            padded = body + bytes(-len(body) & 7)
            pieces.append(record_module._CHECKSUM.pack(uncovered(salt, rest, padded)) + rest + padded)
        return pieces

    patch.setattr(record_module, "checksum", uncovered)
    patch.setattr(record_module, "encode_pieces", encode)
    patch.setattr("penstock.log.segment.encode_pieces", encode)


def incarnation_not_raised(patch: Patch) -> None:
    cut = Log._cut

    def same(self: Log, after: int) -> None:
        self._incarnation -= 1
        cut(self, after)

    patch.setattr(Log, "_cut", same)


def dead_forgotten(patch: Patch) -> None:
    """A dead segment that could not be unlinked is not thought of again."""

    def once(self: Log, names: set[Any]) -> bool:
        self._remove(*names)
        return True

    patch.setattr(Log, "_remove_dead", once)


def leftover_forgotten(patch: Patch) -> None:
    """A segment whose creation failed after its rename is not thought of again."""
    create = Log._create

    def forgetting(self: Log, first: int, *, cut: bool, tail: Sequence[Record] = ()) -> SegmentWriter:
        try:
            return create(self, first, cut=cut, tail=tail)
        finally:
            self._dead.clear()

    patch.setattr(Log, "_create", forgetting)


def unsynced_shown(patch: Patch) -> None:
    patch.setattr(Log, "_sync", lambda self: setattr(self, "_synced", self.last))


def names_vanish_together(patch: Patch) -> None:
    """Truncation from the front unlinks the newest first."""

    def newest_first(self: Log, before: int) -> Any:
        doomed = [a for a, b in itertools.pairwise(self._chain) if b.first <= before]
        self._remove_dead(set(doomed[1:]))
        self._remove_dead(set(doomed[:1]))
        for _ in doomed:
            self._chain = self._chain.without_oldest()

    patch.setattr(Log, "truncate_front", newest_first)


@pytest.mark.parametrize(
    ("seed_bug", "suite"),
    [
        (no_directory_fsync, crashes),
        (rename_without_fsync, crashes),
        (tail_not_truncated, torn_tails),
        (fsync_retried, failed_syncs),
        (failed_bytes_trusted, failed_syncs),
        (short_write_ignored, short_writes),
        (length_not_covered, check_rot),
        (incarnation_not_raised, crashes),
        (dead_forgotten, dead_segments),
        (leftover_forgotten, replaced_segments),
        (unsynced_shown, crashes),
        (names_vanish_together, first_crashes),
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[Patch], None], suite: Callable[[], object]) -> None:
    with seeded(seed_bug), pytest.raises(AssertionError) as caught:  # a Violation is one
        suite()
    assert "recovery failed: A" not in str(caught.value)  # AttributeError and the like: the bug itself is broken
