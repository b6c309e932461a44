"""The change feed of a queue is the difference of snapshots: histories with trims, loads, drops and crashes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from queue_feed_model import Change, Rows, check_feed, follow_queue, queue_changes
from queue_model import contents
from test_queue_machine import QUEUES, SHARDS, QueueMachineTest, queues

import penstock
from penstock.queue.changes import QueueFeedView


class FeedQueueMachine(QueueMachineTest):
    """The queue machine, with a change feed for every queue. That of `a` has preimages."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds: dict[int, tuple[int, Rows, list[Change]]] = {}  # by table: an LSN, the messages at it, and the feed

    def _create(self, queue: str) -> None:
        options = penstock.ChangeOptions(preimages=queue == "a", age_s=None)
        self.store.queue(queue, shards=SHARDS, changes=options)
        super()._create(queue)

    @rule(queue=queues, size=st.integers(1, 9), before=st.integers(0, 12))
    def put_and_trim_together(self, queue: str, size: int, before: int) -> None:
        """Perhaps messages are trimmed by the record that puts them: nobody has seen them."""
        self.batch([5] * size, None, max(1, before + self.model.shards[queue, 0].next - 3))

    @rule()
    def feed_follows(self) -> None:
        self.flush()
        for queue in QUEUES:
            table, preimages = self.store.queue(queue), queue == "a"
            info = self.store._ledger.table(queue)
            assert info is not None
            lsn, rows, earlier = self.feeds.get(info.table_id, (0, [{} for _ in range(SHARDS)], []))
            with self.store.snapshot() as snapshot:
                now = contents(snapshot.queue(queue))  # type: ignore[arg-type]
                changes = queue_changes(snapshot.queue(queue), lsn)
                assert follow_queue(rows, changes, preimages=preimages) == now
                feed = check_feed(table, now, earlier, preimages=preimages)
                self.feeds[info.table_id] = snapshot.lsn, now, feed

    def teardown(self) -> None:
        self.feed_follows()
        super().teardown()

    @invariant()
    def everything_agrees(self) -> None:
        """Of the queue machine: not again."""


FEW = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
SEARCH = settings(
    FEW, max_examples=100, derandomize=True, database=None, phases=[Phase.generate]
)  # that it is found is enough


def test_the_feed_of_a_queue_is_the_difference_of_snapshots() -> None:
    run_state_machine_as_test(FeedQueueMachine, settings=FEW)


def test_a_feed_with_messages_that_nobody_saw_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a record puts and trims is told."""
    parts = QueueFeedView.parts

    def forgetful(self: QueueFeedView, start: int, end: int) -> object:
        monkeypatch.setattr("penstock.queue.changes.max", lambda first, _: first, raising=False)
        return parts(self, start, end)

    monkeypatch.setattr(QueueFeedView, "parts", forgetful)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(FeedQueueMachine, settings=SEARCH)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_many_histories_of_queues() -> None:
    run_state_machine_as_test(FeedQueueMachine, settings=settings(FEW, max_examples=1_000, stateful_step_count=50))
