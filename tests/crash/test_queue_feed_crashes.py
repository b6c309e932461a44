"""The change feed of a queue against every crash: its trims and messages are in its files once, the same ever after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from feed_model import take_in_expired
from queue_feed_model import Change, check_feed
from queue_model import contents, open_queues
from queue_store_scenario import QueueStoreScenario, QueueUser, ShortQueueStore
from shared import Patch, SomeRecoveries, seeded

import penstock
from penstock.queue.chain import FileChain
from penstock.queue.machine import QueueMachine
from penstock.testing import FakeClock, Faults, SimulatedDisk, Violation, explore

pytestmark = pytest.mark.usefixtures("quiet")


class FeedUser(QueueUser):
    """Somebody who uses queues with change feeds."""

    changes = penstock.ChangeOptions(preimages=True, age_s=None)

    def check(self) -> None:
        super().check()
        take_in_expired(self.store)
        for info in self.store._ledger.tables():
            if info.kind == "queue":
                table = self.store.queue(info.name)
                noted = [values for word, *values in self.history.events if word == "fed"]
                earlier: list[Change] = next(
                    (fed for table_id, fed in reversed(noted) if table_id == info.table_id), []
                )
                try:
                    feed = check_feed(table, contents(table), earlier, preimages=self.changes.preimages)
                except AssertionError as error:
                    raise Violation(f"the feed of {info.name} is wrong: {error}") from error
                self.history.note("fed", info.table_id, feed)


class ForgetfulUser(FeedUser):
    """Somebody whose feeds keep little, and no preimages."""

    changes = penstock.ChangeOptions(age_s=None, bytes_max=1_500)


class FeedScenario(QueueStoreScenario):
    user_type = FeedUser


class ShortFeed(ShortQueueStore):
    user_type = FeedUser


class ForgetfulFeed(ShortQueueStore):
    user_type = ForgetfulUser


def trims_after_a_crash() -> None:
    """After a crash the active file is new and empty: then it has trims alone, and another crash comes."""
    disk, clock = SimulatedDisk(), FakeClock()
    store, feed = open_queues(disk, clock), list[Change]()
    table = store.queue("a", changes=FeedUser.changes)
    table.put_many([b"1", b"2", b"3", b"4"], durable=True)
    for before in (2, 3, 4):
        store.checkpoint()
        disk = disk.image().restore("strict")
        store = open_queues(disk, clock)
        table = store.queue("a")
        table.trim(before, durable=True)
        clock.advance(7_200)  # a file that old is left for another, if it has messages
        feed = check_feed(table, contents(table), feed, preimages=True)
    assert [(kind, sequence) for _, kind, _, sequence, _ in feed[4:]] == [("delete", 1), ("delete", 2), ("delete", 3)]


def test_trims_after_a_crash() -> None:
    trims_after_a_crash()


def test_crashes() -> None:
    report = explore(FeedScenario(), modes=("strict",), depth=1, every=7)
    assert report.missing("fdatasync /journal/", "create .data", "commit /manifest") == []


def test_crashes_while_feeds_are_trimmed() -> None:
    report = explore(ForgetfulFeed(), modes=("strict", "torn"), depth=1, every=5)
    assert report.missing("unlink .data", "commit /manifest") == []


def test_crashes_in_recovery_and_faults() -> None:
    explore(SomeRecoveries(ShortFeed(), 90), modes=("strict",), recovery_modes=("strict",))
    faults = Faults(kinds=("eio",), operations=("fdatasync", "fsync", "pwrite"), every=13, images_every=61)
    explore(ShortFeed(), modes=("strict",), depth=1, faults=faults)


def trims_lost_with_their_file(patch: Patch) -> None:
    """A file that has trims and no messages is not carried over after a crash."""
    make = FileChain._create
    patch.setattr(FileChain, "_create", lambda self, position, tail, time_us: make(self, position, (), time_us))


def files_removed_before_the_floor_is_committed(patch: Patch) -> None:
    def hasty(self: QueueMachine) -> None:
        with self._lock:
            self.queue.trim(before_sequence=self.first)

    patch.setattr(QueueMachine, "drop_files", hasty)


def trims_not_written(patch: Patch) -> None:
    append = QueueMachine._append

    def silent(self: QueueMachine, bodies: Any, entry: Any, following: int, _: Any) -> None:
        append(self, bodies, entry, following, None)

    patch.setattr(QueueMachine, "_append", silent)


@pytest.mark.parametrize(
    "seed_bug", [trims_lost_with_their_file, files_removed_before_the_floor_is_committed, trims_not_written]
)
def test_seeded_bugs_are_caught(seed_bug: Callable[[Patch], None]) -> None:
    with seeded(seed_bug), pytest.raises((Violation, AssertionError)):
        trims_after_a_crash()
        explore(FeedScenario(), modes=("strict",), depth=1)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_crash_of_a_queue_with_a_feed() -> None:
    explore(FeedScenario(), modes=("strict", "torn"), depth=1)
    explore(ForgetfulFeed(), modes=("strict", "torn", "kept"), depth=1)
    explore(ShortFeed(), modes=("strict",), recovery_modes=("strict",))
