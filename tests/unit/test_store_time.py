"""A wrong clock does no harm: what has time to live lives, what has none goes, whatever the wall clock says.

Every case runs twice: with the store's clock, and with the rule of before (the wall clock, never back), which fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from store_model import SETTINGS, open_simulated

from penstock.host.clock import Clock
from penstock.host.steady_clock import SteadyClock, TimeNote
from penstock.queue.options import Retention
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

DAY_S = 86_400.0
START_US = 1_800_000_000_000_000


class WallClock(SteadyClock):
    """The rule of before: the wall clock; a record's time is never below that of the one before it."""

    def begin(self, last_us: int, note: TimeNote | None, *, trust: bool = False) -> None: ...

    def time_us(self) -> int:
        return self._clock.time_us()


class MistimedHost:
    """A store on a machine whose clock goes wrong."""

    def __init__(self, make_clock: Callable[[Clock], SteadyClock], patch: pytest.MonkeyPatch) -> None:
        patch.setattr("penstock.store.wiring.SteadyClock", make_clock)
        self.disk, self.clock = SimulatedDisk(), FakeClock(time_us=START_US)
        self.store: Store = open_simulated(self.disk, self.clock)
        self._numbers = 0
        rows, messages = self.store.kv("rows"), self.store.queue("messages", retention=Retention(age_s=30 * DAY_S))
        rows.put(b"thirty days", b"x", ttl_s=30 * DAY_S)
        rows.put(b"counted", (1).to_bytes(8, "little"), ttl_s=30 * DAY_S)
        messages.put(b"a message of today", durable=True)
        self.use_token()

    def use_token(self) -> bool:
        """Use the one token again; whether it was known."""
        with self.store.batch(token=("loader", 17)) as batch:
            batch.kv("rows").put(b"loaded", b"x")
        return batch.duplicate

    def write_and_maintain(self) -> None:
        """A record of now, and everything that removes what is old."""
        rows = self.store.kv("rows")
        for _ in range(4):
            self._numbers += 1
            rows.put(b"filler %d" % self._numbers, bytes(2_000), durable=True)
        rows.merge(b"counted", (1).to_bytes(8, "little"), operator="add_i64")
        self.store.flush()
        self.store.compact("rows")
        self.store.checkpoint()
        self.store._port.maintain()
        self.store.flush()

    def reopen(self) -> None:
        self.store.close()
        self.store = open_simulated(self.disk, self.clock)

    def is_right(self) -> bool:
        """Whether all that should be there is, and one second is about one second."""
        self.write_and_maintain()
        rows = self.store.kv("rows")
        counted = rows.get(b"counted")
        there = (
            rows.get(b"thirty days") == b"x"
            and counted is not None
            and int.from_bytes(counted, "little") == self._numbers // 4 + 1
            and len(self.store.queue("messages").read()) == 1
            and self.use_token()
        )
        rows.put(b"one second", b"x", ttl_s=1.0, durable=True)
        self.clock.advance(0.8)
        young = rows.get(b"one second")
        self.clock.advance(0.4)
        return there and young == b"x" and rows.get(b"one second") is None


def jump(seconds: float) -> Callable[[MistimedHost], None]:
    return lambda host: host.clock.jump(seconds)


def ahead_for_one_record(host: MistimedHost) -> None:
    host.clock.jump(40 * DAY_S)
    host.write_and_maintain()
    host.clock.jump(-40 * DAY_S)


def ahead_while_closed(host: MistimedHost) -> None:
    host.reopen()
    host.clock.jump(40 * DAY_S)
    host.reopen()


def ahead_at_boot(host: MistimedHost) -> None:
    """The battery is empty, or holds nonsense, until the network is there."""
    host.clock.reboot(off_s=60.0)
    host.clock.jump(40 * DAY_S)
    host.reopen()
    host.write_and_maintain()
    host.clock.advance(60.0)
    host.clock.jump(-40 * DAY_S)
    host.write_and_maintain()
    host.clock.advance(3_600.0)


def empty_battery(host: MistimedHost) -> None:
    host.clock.reboot(off_s=60.0)
    host.clock.jump(-START_US / 1_000_000)
    host.reopen()
    host.write_and_maintain()


def year_2262(host: MistimedHost) -> None:
    host.clock.jump(236 * 365 * DAY_S)
    host.write_and_maintain()
    host.reopen()


CASES: list[Callable[[MistimedHost], None]] = [
    jump(40 * DAY_S),
    jump(-40 * DAY_S),
    ahead_for_one_record,
    ahead_while_closed,
    ahead_at_boot,
    empty_battery,
    year_2262,
]


@pytest.mark.parametrize("go_wrong", CASES)
def test_a_wrong_clock_does_no_harm(go_wrong: Callable[[MistimedHost], None], monkeypatch: pytest.MonkeyPatch) -> None:
    host = MistimedHost(SteadyClock, monkeypatch)
    go_wrong(host)
    assert host.is_right()


@pytest.mark.parametrize("go_wrong", CASES)
def test_the_rule_of_before_does_harm(
    go_wrong: Callable[[MistimedHost], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = MistimedHost(WallClock, monkeypatch)
    go_wrong(host)
    assert not host.is_right()


def a_month_at_work(host: MistimedHost) -> None:
    host.clock.advance(31 * DAY_S)


def a_month_closed(host: MistimedHost) -> None:
    host.store.close()
    host.clock.advance(31 * DAY_S)
    host.store = open_simulated(host.disk, host.clock)


def a_month_off(host: MistimedHost) -> None:
    host.store.close()
    host.clock.reboot(off_s=31 * DAY_S, up_s=3_600.0)
    host.store = open_simulated(host.disk, host.clock)


@pytest.mark.parametrize("pass_time", [a_month_at_work, a_month_closed, a_month_off])
def test_what_is_old_goes(pass_time: Callable[[MistimedHost], None], monkeypatch: pytest.MonkeyPatch) -> None:
    host = MistimedHost(SteadyClock, monkeypatch)
    pass_time(host)
    host.write_and_maintain()
    host.write_and_maintain()
    assert host.store.kv("rows").get(b"thirty days") is None
    assert len(host.store.queue("messages").read()) == 0
    assert not host.use_token()


def test_an_operator_can_say_that_the_clock_is_right() -> None:
    disk, clock = SimulatedDisk(), FakeClock(time_us=START_US)
    with open_simulated(disk, clock) as store:
        store.kv("rows").put(b"thirty days", b"x", ttl_s=30 * DAY_S)
    clock.reboot(off_s=60 * DAY_S)
    with open_simulated(disk, clock) as store:
        assert store.kv("rows").get(b"thirty days") == b"x"
        assert "penstock_clock_ahead_seconds 5097610.0" in store.metrics.exposition()  # 59 days
    with open_simulated(disk, clock, replace(SETTINGS, trust_clock=True)) as store:
        assert store.kv("rows").get(b"thirty days") is None
        assert store.clock.time_us() == clock.time_us()
