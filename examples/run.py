"""What is measured while the main job runs, by its threads; read by the live view and the report.

Thread: each list has one writer and only grows; readers take what is there.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import penstock


class Sample(NamedTuple):
    """How much was produced, and how much of it was still to be read, at one moment."""

    at_s: float
    produced: int
    backlog: int


class MicroBatch(NamedTuple):
    """One micro-batch of Spark."""

    at_s: float
    rows: int
    ms: float


class Latency(NamedTuple):
    """How long one reading of this machine took from its put until it was visible."""

    at_s: float
    ms: float
    while_starting: bool  # Spark was not up yet, or was killed meanwhile


@dataclass
class Run:
    """One run of the main job."""

    rate: int
    seconds: float
    folder: Path
    wild: bool
    began: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    began_s: float = field(default_factory=time.monotonic)
    stage: str = "Spark starts"
    produced: int = 0
    up_since_s: float | None = None  # of the query; None: it starts
    samples: list[Sample] = field(default_factory=list)
    batches: list[MicroBatch] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    spark_jobs: int = 0  # that Spark did for the store: rollups
    probes: deque[tuple[int, float]] = field(default_factory=deque)  # readings of this machine: number, when put

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def backlog(self) -> int:
        return self.samples[-1].backlog if self.samples else 0

    def steady_ms(self) -> list[float]:
        """Return the latencies while Spark was up, sorted."""
        return sorted(latency.ms for latency in self.latencies if not latency.while_starting)

    def note_visible(self, put_s: float) -> None:
        """Note that a reading that was put at `put_s` can be seen now."""
        now_s = self.now_s
        starting = self.up_since_s is None or put_s - self.began_s < self.up_since_s
        self.latencies.append(Latency(now_s, (now_s - (put_s - self.began_s)) * 1e3, starting))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the ordered values lie; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def machine() -> str:
    """Describe this machine in a line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, Penstock {penstock.__version__}"
    )
