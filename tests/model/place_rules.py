"""The rules that every Hypothesis machine over a `TreePlace` has: maintenance between its other steps."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tree_place import TreePlace


class MaintenanceRules(RuleBasedStateMachine):
    place: TreePlace

    @rule()
    def flush(self) -> None:
        self.place.flush()

    @rule(everything=st.booleans())
    def compact(self, everything: bool) -> None:
        self.place.compact(everything=everything)

    @rule()
    def freeze(self) -> None:
        self.place.tree.freeze()

    @rule()
    def collect(self) -> None:
        self.place.collector.collect()
