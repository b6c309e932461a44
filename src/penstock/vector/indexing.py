"""The jobs that make and maintain the index of a vector table: centroids, and posting lists of a new generation.

A new generation is built beside the one in use, in steps, each a commit of bounded size:

    train    centroids, from a sample of the vectors, or from those in use with long lists split and short ones
             dissolved; from this commit on new vectors join lists of the new generation when they are written
    assign   the older vectors to lists, ASSIGN_IDS internal ids at a time
    use      searches use the new generation; the one before is dropped

The work of a step is done from the files of a snapshot, in any process; its result is a section of the table, so every
replica and replay has the same index. A step that is repeated does no harm: it is planned anew from what is stored.

Thread: a plan in the owner, one at a time for a table (the gate of its job ensures it); the work anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from pyroaring import BitMap64

from penstock.errors import Invalid
from penstock.journal.partitions import PartitionId
from penstock.kinds import Host, SnapshotReading, partitions_of
from penstock.lsm.view import View
from penstock.lsm.writer import index_path
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.scheduler.offers import JobPart
from penstock.scheduler.task import StopSignal
from penstock.scheduler.work import WorkCancelled, pack
from penstock.vector.keys import CENTROID, DELETED, F32, FIRST_ID, U64, list_of, list_range
from penstock.vector.lists import faiss_installed
from penstock.vector.loaded import LoadedIndex
from penstock.vector.machine import VectorMachine
from penstock.vector.operators import decode_ids, encode_ids, id_array
from penstock.vector.options import VectorOptions
from penstock.vector.pieces import open_piece, piece_files, stored_rows
from penstock.vector.section import IndexChange, VectorSection
from penstock.vector.stored import (
    Generations,
    read_centroids,
    read_generations,
    read_postings,
    read_sequence,
    vector_slices,
)
from penstock.vector.training import (
    TRAINED_ROWS_MIN,
    choose_probes,
    k_means,
    list_count,
    plan_lists,
    rebalanced,
    sample_size,
)

ASSIGN_IDS = 1 << 16  # of one part, and
ASSIGN_PARTS = 4  # of one commit
DELETED_SHARE = 0.25  # of the vectors in lists: from here on a new generation leaves deleted ones out
MEMBERS_MAX = 4_096  # of a list that is split
PROBE_QUERIES = 64
TRAIN, ASSIGN, USE = "train", "assign", "use"


# -- what to do


def next_step(rows: View) -> str | None:
    """Return the next step for a shard; None if its index needs no work."""
    now, sequence = read_generations(rows), read_sequence(rows)
    if now.building:
        return ASSIGN if max(now.assigned, FIRST_ID) < now.until else USE
    if not now.current:
        return TRAIN if sequence.count >= TRAINED_ROWS_MIN else None
    deleted = decode_ids(rows.get(DELETED))
    sizes, deleted_count = _sizes(rows, now.current, deleted)
    if deleted_count > DELETED_SHARE * max(1, int(sizes.sum())) or plan_lists(sizes):
        return TRAIN
    return None


def _sizes(rows: View, generation: int, deleted: BitMap64) -> tuple[Any, int]:
    """Return the number of vectors in each list, and how many deleted ones lists have."""
    positions = {number: position for position, number in enumerate(_list_numbers(rows, generation))}
    sizes, deleted_count = np.zeros(len(positions), np.int64), 0
    for number, ids in read_postings(rows, generation):
        dead = ids.intersection_cardinality(deleted) if deleted else 0
        deleted_count += dead
        if number in positions:
            sizes[positions[number]] = len(ids) - dead
    return sizes, deleted_count


def _list_numbers(rows: View, generation: int) -> list[int]:
    return [list_of(key) for key, _ in rows.scan(*list_range(CENTROID, generation))]


def _new_generation(now: Generations) -> int:
    return max(now.current, now.building) + 1


# -- the steps, from the rows of a shard


def train(rows: View, options: VectorOptions, check: Callable[[], None]) -> IndexChange:
    """Return the centroids of a new generation."""
    now, count = read_generations(rows), read_sequence(rows).count
    generation = _new_generation(now)
    centroids: F32 | None = None
    if now.current and count >= TRAINED_ROWS_MIN:
        sizes, _ = _sizes(rows, now.current, decode_ids(rows.get(DELETED)))
        before = read_centroids(rows, now.current, options.dimensions)
        plan = plan_lists(sizes)
        if len(before) and len(before) * 4 > list_count(count):
            members = _Members(rows, options, now.current, before.numbers.tolist(), plan.split)
            centroids = rebalanced(before.matrix, plan, members, options.metric, seed=generation)
    if centroids is None:
        centroids = k_means(_sample(rows, options, sample_size(count), check), list_count(count), options.metric)
    check()
    return IndexChange(
        generation=generation,
        centroids=[(number, row.astype("<f4").tobytes()) for number, row in enumerate(centroids)],
    )


def _sample(rows: View, options: VectorOptions, size: int, check: Callable[[], None]) -> F32:
    """Return about `size` vectors, spread over all."""
    every = max(1, read_sequence(rows).count // max(1, size))
    parts: list[F32] = [np.zeros((0, options.dimensions), np.float32)]
    skipped = 0
    for _, vectors in vector_slices(rows, options.dimensions):
        check()
        parts.append(np.array(vectors[skipped::every]))
        skipped = (skipped - len(vectors)) % every
    return np.concatenate(parts)


class _Members:
    """Vectors of the lists that are split, read once."""

    def __init__(
        self, rows: View, options: VectorOptions, generation: int, numbers: list[int], split: dict[int, int]
    ) -> None:
        member_ids: dict[int, U64] = {}
        positions = {number: position for position, number in enumerate(numbers)}
        for number, listed in read_postings(rows, generation):
            position = positions.get(number)
            if position is not None and position in split:
                member_ids[position] = id_array(listed)[:: max(1, len(listed) // MEMBERS_MAX)]
        self._member_ids = member_ids
        all_ids = np.unique(np.concatenate([np.zeros(0, np.uint64), *member_ids.values()]))
        self._ids: U64 = np.zeros(0, np.uint64)
        self._vectors = np.zeros((0, options.dimensions), np.float32)
        ids: list[U64] = [self._ids]
        vectors: list[F32] = [self._vectors]
        for some, matrix in vector_slices(rows, options.dimensions) if len(all_ids) else ():
            here = np.isin(some, all_ids)
            ids.append(some[here])
            vectors.append(matrix[here])
        self._ids, self._vectors = np.concatenate(ids), np.concatenate(vectors)

    def __call__(self, position: int) -> F32:
        ids = self._member_ids.get(position, np.zeros(0, np.uint64))
        ids = ids[np.isin(ids, self._ids)]
        return self._vectors[np.searchsorted(self._ids, ids)]


def assign(rows: View, options: VectorOptions, start: int, end: int, check: Callable[[], None]) -> list[Any]:
    """Return the lists of internal ids in [start, end), in the generation that is being built: (list, ids)."""
    centroids = read_centroids(rows, read_generations(rows).building, options.dimensions)
    if not len(centroids):
        return []
    ids_by_list: dict[int, BitMap64] = {}
    for ids, vectors in vector_slices(rows, options.dimensions, start, end):
        check()
        lists = centroids.numbers[centroids.nearest(vectors, options.metric)]
        order = np.argsort(lists, kind="stable")
        numbers, starts = np.unique(lists[order], return_index=True)
        for number, members in zip(numbers.tolist(), np.split(ids[order], starts[1:]), strict=True):
            ids_by_list.setdefault(number, BitMap64()).update(members.tolist())
    return [(number, encode_ids(ids)) for number, ids in sorted(ids_by_list.items())]


def use(rows: View, options: VectorOptions, check: Callable[[], None]) -> IndexChange:
    """Return the change that takes the generation that was built into use."""
    generation = read_generations(rows).building
    listed = BitMap64()
    for _, ids in read_postings(rows, generation):
        listed |= ids
    check()
    index = LoadedIndex(rows, options, generation).index
    check()
    probes = 0 if not faiss_installed() else 1  # 0: not measured
    if index.lists > 1 and index.count:
        probes, _ = choose_probes(index, _sample(rows, options, PROBE_QUERIES, check)[: 2 * PROBE_QUERIES])
    forgotten = decode_ids(rows.get(DELETED)) - listed
    return IndexChange(
        generation=generation, use=True, probes=probes, forgotten=encode_ids(forgotten) if forgotten else b""
    )


# -- plans


def plan_index(info: TableInfo, host: Host) -> IndexPlan | None:
    """Plan the next step for a table; None if no shard needs one."""
    for partition in partitions_of(info):
        machine: VectorMachine = host.machine(partition)
        if is_due(machine):
            machine.store_now()  # the work reads files
            snapshot = host.port.snapshot()
            try:
                step = next_step(machine.tree.view)
                if step is not None:
                    return IndexPlan(partition, step, machine, host, snapshot)
            except BaseException:
                snapshot.close()
                raise
            snapshot.close()
            machine.indexed_at = read_sequence(machine.tree.view)
    return None


def is_due(machine: VectorMachine) -> bool:
    """Whether to check the lists of a shard: much was written or deleted since the last check, or a build is open."""
    now, sequence = read_generations(machine.tree.view), read_sequence(machine.tree.view)
    if now.building:
        return True
    if not now.current:
        return sequence.count >= TRAINED_ROWS_MIN
    written = sequence.next - machine.indexed_at.next
    deleted = machine.indexed_at.count + written - sequence.count
    return max(written, deleted) > max(1_000, sequence.count // 20)


class IndexPlan:
    """One step for one shard: a `Derivation`."""

    function: str = f"{__name__}:index_part"

    def __init__(
        self, partition: PartitionId, step: str, machine: VectorMachine, host: Host, snapshot: SnapshotReading
    ) -> None:
        self._partition = partition
        self._step = step
        self._machine = machine
        self._host = host
        self._snapshot = snapshot
        now = read_generations(machine.tree.view)
        self._generation = now.building
        start = max(now.assigned, FIRST_ID)
        self._until = min(now.until, start + ASSIGN_IDS * ASSIGN_PARTS)
        (piece,) = snapshot.pieces(partition, 1)
        detail = stored_rows(piece.detail)  # what was written since `store_now` joined lists when it was written
        files = [name for file in piece_files(detail) for name in (file, index_path(file))]
        ranges = [(0, 0)]
        if step == ASSIGN:
            ranges = [(low, min(low + ASSIGN_IDS, self._until)) for low in range(start, self._until, ASSIGN_IDS)]
        self.parts: Sequence[JobPart] = [
            JobPart(
                arguments=pack({"detail": detail, "identity": host.identity, "step": step, "start": low, "end": high}),
                reads=tuple(files),
            )
            for low, high in ranges
        ]

    def commit(self, results: Sequence[Any]) -> None:
        """Write the result of the step."""
        if self._step == ASSIGN:
            ids_by_list: dict[int, BitMap64] = {}
            for result in results:
                for number, ids in result:
                    ids_by_list.setdefault(number, BitMap64()).update(decode_ids(ids))
            added = [(number, encode_ids(ids)) for number, ids in sorted(ids_by_list.items())]
            change = IndexChange(generation=self._generation, added=added, assigned=self._until)
        else:
            change = decode_change(results[0])
        group = PendingGroup()
        group.sections[self._partition] = VectorSection(change)
        self._host.port.commit_and_wait(group, len(encode_change(change)) + 1_024)
        if change.use:
            self._machine.indexed_at = read_sequence(self._machine.tree.view)
            self._machine.live.refresh()

    def close(self) -> None:
        self._snapshot.close()


def encode_change(change: IndexChange) -> bytes:
    """Encode a change of the index."""
    return msgspec.msgpack.encode(change)


def decode_change(data: bytes) -> IndexChange:
    """Decode a change of the index."""
    return msgspec.msgpack.decode(data, type=IndexChange)


# -- work


def index_part(arguments: dict[str, Any], stop: StopSignal) -> Any:
    """Do a step, or a part of it, as work."""
    opened = open_piece(arguments["detail"], arguments["root"], arguments["identity"])
    if opened is None:
        raise Invalid("the files of a vector table cannot be read here: run its jobs where its folder is")

    def check() -> None:
        if stop.is_set():
            raise WorkCancelled("the work on an index was asked to stop")

    rows, options = opened
    if arguments["step"] == ASSIGN:
        return assign(rows, options, arguments["start"], arguments["end"], check)
    return encode_change((train if arguments["step"] == TRAIN else use)(rows, options, check))
