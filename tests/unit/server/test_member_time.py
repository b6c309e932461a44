"""Members whose wall clocks are wrong: the cluster's time neither jumps nor goes back, whoever leads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.host.clock import SystemClock
from penstock.server.member import Member
from penstock.testing.members import LocalCluster, await_true

HOUR_US = 3_600 * 1_000_000
SLACK_US = 300 * 1_000_000  # for whatever a busy machine does; an hour is found


class WrongClock(SystemClock):
    """The clocks of a machine whose wall clock is off, and that was started a while ago."""

    def __init__(self, ahead_us: int, boot: bytes = b"first boot") -> None:
        self.ahead_us, self.boot = ahead_us, boot

    def time_us(self) -> int:
        return super().time_us() + self.ahead_us

    def boot_us(self) -> int:
        return super().boot_us() + HOUR_US

    def boot_id(self) -> bytes:
        return self.boot


class SkewedCluster(LocalCluster):
    """Members a, b, and c, whose wall clock is wrong."""

    def __init__(self, folder: Path, ahead_us: int) -> None:
        super().__init__(folder, start=False)
        self.wrong = WrongClock(ahead_us)
        for name in self.names:
            self.begin(name)

    def begin(self, name: str) -> Member:
        self.options["clock"] = self.wrong if name == "c" else WrongClock(0)
        return self.start(name)

    def let_lead(self, name: str) -> None:
        """Let members resign until this one leads."""

        def leads() -> bool:
            if (leader := self.leader()) != name:
                self.members[leader]._journal.resign()
            return self.members[name].is_leader

        await_true(leads, f"{name} to lead")

    def newest_us(self) -> int:
        """Return the time of a record that is written now."""
        self.write(lambda store: store.kv("users").put(b"now", b"", durable=True))
        return self.leader_store()._ledger.tree.time_us


@pytest.fixture(params=[HOUR_US, -HOUR_US], ids=["ahead", "behind"])
def members(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SkewedCluster]:
    members = SkewedCluster(tmp_path, request.param)
    members.let_lead("a")
    members.write(lambda store: store.kv("users").put(b"half an hour", b"x", ttl_s=1_800, durable=True))
    yield members
    members.close()


def _check_time(members: SkewedCluster, before_us: int, since_us: int) -> int:
    """Check that time went on as it passed, and that nothing expired early, on any member."""
    now_us, passed_us = members.newest_us(), SystemClock().boot_us() - since_us
    assert before_us <= now_us <= before_us + passed_us * 11 // 10 + SLACK_US
    for name, store in members.await_agreement().items():
        assert store.kv("users").get(b"half an hour") == b"x", f"the row has expired on {name}"
    return now_us


def test_a_new_leader_goes_on_with_the_cluster_s_time(members: SkewedCluster) -> None:
    since_us, before_us = SystemClock().boot_us(), members.newest_us()
    for leader in "cbc":
        members.let_lead(leader)
        before_us = _check_time(members, before_us, since_us)


def test_a_member_of_a_machine_that_was_started_again_and_of_a_new_disk(members: SkewedCluster) -> None:
    since_us, before_us = SystemClock().boot_us(), members.newest_us()
    for disk in ("old", "new"):
        members.stop("c")
        if disk == "new":
            members.wipe("c")
        members.wrong.boot += b" and another"  # nothing in its folder says how much time passed
        members.begin("c")
        await_true(lambda: not members.members["c"].is_joining)
        before_us = _check_time(members, before_us, since_us)
        members.let_lead("c")
        before_us = _check_time(members, before_us, since_us)


def test_all_are_started_again_and_the_one_with_the_wrong_clock_leads(members: SkewedCluster) -> None:
    since_us, before_us = SystemClock().boot_us(), members.newest_us()
    members.await_agreement()
    members.close()
    members.begin("c")
    members.begin("b")
    members.let_lead("c")
    _check_time(members, before_us, since_us)
