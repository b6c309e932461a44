"""Tracing: a function of the user's gets every stage of every write.

    encode    a batch of writes is encoded as journal records
    journal   the records are written and synced
    apply     a record is applied to one partition
    dispatch  a whole batch: judged by the ledger, applied to every partition

Thread: the one that does the work; several at a time. The function must be quick: writers wait for it.
Invariant: a function that raises is not called again, and changes nothing for the write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.host import threads
from penstock.host.clock import Clock
from penstock.partition.machine import Entry, PartitionDescriptor, PartitionStateMachine

logger = logging.getLogger(__name__)

Stage = Literal["encode", "journal", "apply", "dispatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStage:
    """One stage of a write, for `StoreSettings.trace`.

    >>> stages = []
    >>> settings = penstock.StoreSettings(trace=stages.append)
    >>> with penstock.open("traced/", settings=settings) as traced:
    ...     epoch = traced.kv("users").put(b"ada", b"1815", durable=True)
    >>> [stage.stage for stage in stages if stage.lsn == stages[-1].lsn]
    ['encode', 'journal', 'apply', 'dispatch']
    """

    stage: Literal["encode", "journal", "apply", "dispatch"]
    lsn: int  # of the record; the last one of a batch
    began_s: float  # by the monotonic clock
    duration_s: float
    size: int = 0  # bytes
    table: str = ""  # the table and shard that a record is applied to
    shard: int = 0


Trace: TypeAlias = Callable[[WriteStage], object]


class Tracer:
    """Passes stages to the user's function, until that raises."""

    def __init__(self, trace: Trace, clock: Clock) -> None:
        self._trace: Trace | None = trace
        self._monotonic_s = clock.monotonic_s

    def emit(
        self, stage: Stage, lsn: int, began_s: float, ended_s: float, *, size: int, table: str = "", shard: int = 0
    ) -> None:
        """Pass a stage that ended."""
        trace = self._trace
        if trace is None:
            return
        try:
            trace(
                WriteStage(
                    stage=stage,
                    lsn=lsn,
                    began_s=began_s,
                    duration_s=ended_s - began_s,
                    size=size,
                    table=table,
                    shard=shard,
                )
            )
        except Exception as error:
            threads.raise_interrupt(error)
            self._trace = None
            logger.exception("the function for tracing failed, and is not called again")

    def attach(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine) -> None:
        """Report each entry that is applied to a partition."""
        apply, monotonic_s = machine.apply, self._monotonic_s

        def apply_traced(entry: Entry) -> None:
            began_s = monotonic_s()
            apply(entry)
            ended_s, table, shard = monotonic_s(), descriptor.name, descriptor.shard
            self.emit("apply", entry.lsn, began_s, ended_s, size=entry.size, table=table, shard=shard)

        with suppress(AttributeError):  # the machine of another package may have slots: it is not traced
            machine.apply = apply_traced  # type: ignore[method-assign]
