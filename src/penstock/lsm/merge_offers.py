"""Large merges for external drivers: split by key, posted on the offer board, done by the driver that takes them.

A part is a separate merge over a range of keys, with its own ids for outputs, so that the outputs of all parts are in
key order and do not overlap. A part returns only the chunk ids of its outputs: the owner reads the rest from the files.

Thread: the job's, which waits for the offer; `merge_part` runs wherever the work is done.
Invariant: the parts of a plan together cover its keys, each key once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import msgspec

from penstock.errors import Invalid, PenstockError
from penstock.host.files import FileSystem
from penstock.lsm.index import Summary
from penstock.lsm.merge import MergeInput, MergePlan, merge, outputs_max, sstable_path
from penstock.lsm.sstable import Sstable
from penstock.lsm.version import TableFile
from penstock.lsm.writer import BATCH_BYTES, BATCH_ROWS, index_path
from penstock.scheduler.offers import JobPart, OfferBoard
from penstock.scheduler.task import StopSignal
from penstock.scheduler.work import WorkCancelled, pack

logger = logging.getLogger(__name__)

PARTS_MAX = 64
PARTS_PER_SLOT = 2  # so that a slow part does not delay the end
PART_BYTES_MIN = 32 << 20

Reserve = Callable[[int], Sequence[int]]


class MergeOffers:
    """Offers large merges of a store to drivers, if one is connected."""

    def __init__(self, board: OfferBoard, *, fs: FileSystem, root: str, bytes_min: int) -> None:
        self._board = board
        self._fs = fs
        self._root = root
        self._bytes_min = bytes_min

    def merge(
        self, plan: MergePlan, files: Sequence[TableFile], reserve: Reserve, stop: Callable[[], bool]
    ) -> list[Summary] | None:
        """Have a driver do a merge; return the outputs' summaries, or None to merge here: small, or no driver did it.

        Names in `plan` are relative to the store; `files` are its inputs, and the ids of outputs come from `reserve`.
        """
        size, slots = sum(file.meta.size_bytes for file in files), self._board.slots()
        if size < self._bytes_min or not slots:
            return None
        count = max(1, min(PARTS_MAX, slots * PARTS_PER_SLOT, size // PART_BYTES_MIN))
        try:
            plans = list(share(plan, [file.table() for file in files], count, reserve))
            chunk_ids = self._wait([_part(shared) for shared in plans], stop)
            return self._accept_outputs(
                plan, chunk_ids, {chunk_id for shared in plans for chunk_id in shared.chunk_ids}
            )
        except WorkCancelled:
            raise
        except (PenstockError, OSError, msgspec.ValidationError) as error:
            logger.warning("a merge of %d bytes is done here, because a driver did not do it: %s", size, error)
            # Its frames hold the inputs, and log handlers may keep it: the files could not be deleted.
            error.__traceback__ = None
            return None

    def _wait(self, parts: Sequence[JobPart], stop: Callable[[], bool]) -> list[int]:
        handle = self._board.submit_parts(f"{__name__}:merge_part", parts)
        outputs = msgspec.convert(handle.wait(stop), list[list[int]])
        return [chunk_id for ids in outputs for chunk_id in ids]

    def _accept_outputs(self, plan: MergePlan, chunk_ids: Sequence[int], allowed: set[int]) -> list[Summary]:
        """Check the outputs of a driver and sync them; raise if they cannot be used."""
        if len(set(chunk_ids)) < len(chunk_ids) or not allowed.issuperset(chunk_ids):
            raise Invalid("a driver names files that it was not to write")
        summaries: list[Summary] = []
        for chunk_id in chunk_ids:
            path = sstable_path(f"{self._root}/{plan.folder}", chunk_id)
            table = Sstable.open(path, fs=self._fs, key=plan.key)
            summaries.append(table.summary)
            table.close()
            if (table.summary.store, table.summary.chunk_id) != (plan.store, chunk_id):
                raise Invalid(f"{path} was built for another store or under another id")
            for name in (path, index_path(path)):
                file = self._fs.open(name, write=True)
                try:
                    file.fsync()  # its writer may have been on another machine
                finally:
                    file.close()
        summaries.sort(key=lambda summary: summary.start)
        if any(one.end > other.start for one, other in pairwise(summaries)):
            raise Invalid("the files that a driver made reach into each other")
        self._fs.fsync_dir(f"{self._root}/{plan.folder}")
        return summaries


def share(plan: MergePlan, tables: Sequence[Sstable], count: int, reserve: Reserve) -> Iterator[MergePlan]:
    """Split a plan into up to `count` plans, each for a key range and the inputs that overlap it."""
    landmarks = sorted(landmark for table in tables for landmark in table.landmarks())
    borders = [plan.start, *_cuts(landmarks, count, plan.start, plan.end), plan.end]
    for start, end in pairwise(borders):
        assert start is not None
        inside = [
            (source, table)
            for source, table in zip(plan.inputs, tables, strict=True)
            if table.summary.end > start and (end is None or table.summary.start < end)
        ]
        if not inside:
            continue
        # A batch counts where it begins, and may cross the next border: one more for each input is enough.
        batches = [(rows, size) for key, rows, size in landmarks if key >= start and (end is None or key < end)]
        rows = sum(rows for rows, _ in batches) + len(inside) * BATCH_ROWS
        size = sum(size for _, size in batches) + sum(_largest_batch(table) for _, table in inside)
        yield replace(
            plan,
            inputs=tuple(source for source, _ in inside),
            chunk_ids=tuple(reserve(outputs_max(rows, size, plan.output_bytes))),
            start=start,
            end=end,
        )


def _largest_batch(table: Sstable) -> int:
    return max((size for _, _, size in table.landmarks()), default=BATCH_BYTES)


def _cuts(landmarks: Sequence[tuple[bytes, int, int]], count: int, start: bytes, end: bytes | None) -> list[bytes]:
    """Return up to `count - 1` keys inside (start, end) that split it into parts of similar bytes."""
    total, before, cuts = sum(size for _, _, size in landmarks), 0, list[bytes]()
    for key, _, size in landmarks:
        last = cuts[-1] if cuts else start
        full = len(cuts) + 1 < count and before * count >= total * (len(cuts) + 1)
        if full and last < key and (end is None or key < end):
            cuts.append(key)
        before += size
    return cuts


def _part(plan: MergePlan) -> JobPart:
    """Return a merge as a part of an offer."""
    outputs = [sstable_path(plan.folder, chunk_id) for chunk_id in plan.chunk_ids]
    return JobPart(
        arguments=pack(asdict(plan)),
        reads=tuple(name for source in plan.inputs for name in (source.path, index_path(source.path))),
        writes=tuple(name for output in outputs for name in (output, index_path(output))),
    )


def as_tuples(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return arguments with the named ones as tuples again: sending them made lists of these."""
    return {name: tuple(value) if name in names else value for name, value in arguments.items()}


def merge_part(arguments: dict[str, Any], stop: StopSignal) -> list[int]:
    """Run a part as work: merge the files under `root`, as process `maker`, and return the ids of the outputs."""
    root, maker = arguments.pop("root"), arguments.pop("maker", "")
    inputs = tuple(MergeInput(path=source["path"], lsn=source["lsn"]) for source in arguments.pop("inputs"))
    plan = MergePlan(inputs=inputs, **as_tuples(arguments, "chunk_ids", "sealing"))
    return [summary.chunk_id for summary in merge(plan.under(root), stop=stop.is_set, maker=maker)]
