"""What a tree promises across crashes, as a scenario: a flush or a compaction loses nothing and leaves nothing.

A tree has no journal of its own. The history holds every edit (`edit`), and what was told to be stored (`stored`): a
resumed tree must answer, after the edits above its `stored` are applied again, exactly what the model answers, and
`stored` must not have gone back. That catches a lost file and a file counted twice: edits hold merges.
"""

from __future__ import annotations

from shard_scenario import ShardScenario
from tree_under_test import Model, TreeUnderTest, Write

from penstock.lsm.rows import NEVER
from penstock.testing import History, SimulatedDisk, Violation


def one() -> bytes:
    return (1).to_bytes(8, "little")


def batch(number: int) -> list[Write]:
    return [
        Write("put", b"p%d" % (number % 7), b"v%d" % number * 8),
        Write("add_i64", b"count", one()),
        Write("append", b"log%d" % (number % 2), b"%d," % number),
        Write("delete", b"p%d" % ((number + 3) % 7)),
        Write("put", b"t%d" % number, b"x", NEVER if number % 2 else 1_700_000_000_000_000 + 5_000_000),
        *([Write("delete_range", b"p5", b"p7")] if number % 4 == 0 else []),
    ]


class TreeScenario(ShardScenario[TreeUnderTest]):
    """Edits of all kinds."""

    records = 9
    flush_every = 1
    compact_every = 3

    def make(self, disk: SimulatedDisk) -> TreeUnderTest:
        return TreeUnderTest(disk, grace_s=0)

    def write(self, shard: TreeUnderTest, history: History, number: int) -> None:
        history.note("edit", number, shard.clock.time_us())
        shard.write(batch(number))

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        shard = self.reopen(disk, history)
        last_us = max([0, *(event[2] for event in history.events if event[0] == "edit")])
        shard.clock.advance(max(0.0, (last_us - shard.clock.time_us()) / 1e6))  # the time of records never goes back
        try:
            for word, *values in history.events:
                if word == "edit" and values[0] > shard.tree.stored:
                    shard.write_at(batch(values[0]), values[0], values[1])
            self.check(shard, history)
            shard.collector.collect()
            shard.clock.advance(1)
            shard.collector.collect()
            self._no_strays(shard)
            self.write(shard, history, 1 + max([0, *(event[1] for event in history.events if event[0] == "edit")]))
            self.store(shard, history)
            shard.compact()
            shard.collector.collect()
            self.check(shard, history)
            self._no_strays(shard)
        finally:
            shard.close()

    def check(self, shard: TreeUnderTest, history: History) -> None:
        model = Model()
        for word, *values in history.events:
            if word == "edit":
                model.write(batch(values[0]), values[1])
        expected = model.live(max(shard.clock.time_us(), shard.tree.time_us))
        rows = dict(shard.tree.scan())
        if rows != expected:
            wrong = {k: (rows.get(k), expected.get(k)) for k in {*rows, *expected} if rows.get(k) != expected.get(k)}
            raise Violation(f"the tree answers otherwise than it was told (found, expected): {wrong}")

    def _no_strays(self, shard: TreeUnderTest) -> None:
        listed = {file.meta.file_name.rsplit("/", 1)[-1] for file in shard.tree._version.files()}
        names = {*listed, *(name.replace(".sst", ".idx") for name in listed)}
        strays = set(shard.files()) - names
        if strays:
            raise Violation(f"files that nobody lists are left: {sorted(strays)}")
