"""The rules of every Hypothesis machine over a `ShardUnderTest`: maintenance between its other steps."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tree_under_test import ShardUnderTest


class MaintenanceRules(RuleBasedStateMachine):
    shard: ShardUnderTest

    @rule()
    def flush(self) -> None:
        self.shard.flush()

    @rule(everything=st.booleans())
    def compact(self, everything: bool) -> None:
        self.shard.compact(everything=everything)

    @rule()
    def freeze(self) -> None:
        self.shard.tree.freeze()

    @rule()
    def collect(self) -> None:
        self.shard.collector.collect()
