"""What a series shard promises across crashes, as a scenario.

The history holds every record (`write`), and what was told to be stored. A resumed shard, after the records above its
`stored` are applied again, must answer what the model answers; *before* that, whatever files it has must hold together:
no sample without its series, no series without its labels (the RFC's issue 95).
"""

from __future__ import annotations

import numpy as np
from series_under_test import SeriesModel, SeriesUnderTest, block, labels, select
from shard_scenario import ShardScenario

from penstock.errors import CorruptionError
from penstock.series.blocks import Block
from penstock.series.keys import FORWARD, GROUP_SHIFT, SAMPLES, bucket_of, group_of, number_of
from penstock.series.section import BucketTrim, Part, SeriesDelete, SeriesSection
from penstock.testing import History, SimulatedDisk, Violation

MINUTE = 60_000_000


def record(number: int) -> list[Part]:
    """The parts of a record: old and new series, several buckets, late and repeated samples, now and then a delete."""
    hosts = [labels("cpu", host=f"h{(number + shift) % 5}") for shift in range(3)] + [labels("up", run=f"r{number}")]
    times = [number * MINUTE, number * MINUTE - 3 * MINUTE, number * MINUTE + 7]
    parts: list[Part] = [block([(host, time, number * 100 + at) for host in hosts for at, time in enumerate(times)])]
    if number % 4 == 0:
        parts.append(SeriesDelete('cpu{host=~"h[01]"}', (number - 2) * MINUTE, number * MINUTE))
    if number % 7 == 0:
        parts.append(BucketTrim(5 * MINUTE))
    return parts


class SeriesScenario(ShardScenario[SeriesUnderTest]):
    """Samples, deletes and trims."""

    records = 8
    flush_every = 2
    compact_every = 4

    def make(self, disk: SimulatedDisk) -> SeriesUnderTest:
        return SeriesUnderTest(disk, grace_s=0)

    def write(self, shard: SeriesUnderTest, history: History, number: int) -> None:
        history.note("write", number)
        shard.write(*record(number))

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        shard = self.reopen(disk, history)
        try:
            whole(shard)
            stored = shard.tree.stored
            for word, *values in list(history.events):
                if word != "write":
                    continue
                for part in record(values[0])[1:]:
                    self.reached[f"{type(part).__name__} {'stored' if values[0] <= stored else 'replayed'}"] += 1
                if values[0] > stored:
                    shard.apply(values[0], shard.clock.time_us(), SeriesSection(*record(values[0])))
            self.check(shard, history)
            self.write(shard, history, 1 + shard.tree.lsn)
            self.store(shard, history)
            self.compact(shard, history)
            self.collect(shard, history)
            self.check(shard, history)
            whole(shard)
        finally:
            shard.close()

    def check(self, shard: SeriesUnderTest, history: History) -> None:
        model = SeriesModel()
        for word, *values in history.events:
            if word == "write":
                for part in record(values[0]):
                    model.add(part)
        state = shard.machine.snapshot()
        try:
            contents = select(state)
        except CorruptionError as error:
            if shard.disk.damaged:
                raise  # the right answer to bit rot
            raise Violation(str(error)) from error  # a series without labels
        finally:
            state.close()
        if contents != model.samples:
            wrong = {k for k in {*contents, *model.samples} if contents.get(k) != model.samples.get(k)}
            raise Violation(f"the shard answers otherwise than it was told: {sorted(wrong)[:5]}")


def whole(shard: SeriesUnderTest) -> None:
    """Raise `Violation` if a sample of the stored rows belongs to no series."""
    rows = dict(shard.tree.scan())
    labelled = {(bucket_of(key), number_of(key)) for key in rows if key[4] == FORWARD}
    for key, value in rows.items():
        if key[4] == SAMPLES:
            ids = np.unique(Block(value).read().ids).tolist()
            orphans = [number for number in ids if (bucket_of(key), number) not in labelled]
            if orphans or any(number >> GROUP_SHIFT != group_of(key) for number in ids):
                raise Violation(f"samples of series {orphans} are stored without their labels")
