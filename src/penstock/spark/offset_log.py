"""Reads Spark's checkpoint of a stream: the messages of each micro-batch, and which batches are done.

Thread: the driver's.
Invariant: Spark writes a batch's end to `offsets/` before it runs, and its number to `commits/` after.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import NotFound, PositionConflict

Offsets = dict[int, int]


def distance(start: Offsets, end: Offsets) -> int:
    """Return the number of messages in [start, end)."""
    return sum(max(0, end[shard] - start[shard]) for shard in end)


class OffsetLog:
    """The checkpoint in a folder, of a stream whose consumer is at `start`."""

    def __init__(self, spark: Any, folder: str, start: Offsets) -> None:
        self._context = spark.sparkContext
        self._folder = folder
        self._start = start

    def check(self, consumer: str) -> None:
        """Raise `PositionConflict` if Spark would skip messages that the consumer has not read.

        Spark marks a batch done after the consumer was moved, so such a folder belongs to another consumer or queue.
        """
        numbers = [int(name) for name in self._names("commits") if name.isdigit()]
        done = self._read(max(numbers)) if numbers else None
        if done is None:
            return
        if set(done) != set(self._start) or any(self._start[shard] < done[shard] for shard in done):
            raise PositionConflict(
                f"the checkpoint is ahead of consumer {consumer}, or another queue's ({self._folder} is at {done}, the "
                f"consumer at {self._start}): give each stream its own, or delete it"
            )

    def range_of(self, number: int) -> tuple[Offsets, Offsets]:
        """Return the start and end of a batch."""
        end = self._read(number)
        if end is None:
            raise NotFound(f"{self._folder} does not say which messages batch {number} has: delete it, and start again")
        return (self._read(number - 1) if number else None) or self._start, end

    def _read(self, number: int) -> Offsets | None:
        path, system = self._file(f"offsets/{number}")
        if not system.exists(path):
            return None
        stream = system.open(path)
        try:
            text = self._context._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        offset = json.loads(text.splitlines()[-1])
        return {int(shard): int(sequence) for shard, sequence in offset.items() if shard.isdecimal()}

    def _names(self, folder: str) -> list[str]:
        path, system = self._file(folder)
        return [status.getPath().getName() for status in system.listStatus(path)] if system.exists(path) else []

    def _file(self, name: str) -> tuple[Any, Any]:
        """Return the path of a file of the checkpoint, and its file system."""
        path = self._context._jvm.org.apache.hadoop.fs.Path(f"{self._folder}/{name}")
        return path, path.getFileSystem(self._context._jsc.hadoopConfiguration())
