"""The time of a store follows the time that passes, whatever the wall clock does."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.clock import SystemClock
from penstock.host.steady_clock import (
    DAY_US,
    LATEST_US,
    SLEW,
    SteadyClock,
    TimeNote,
    opening_time_us,
    read_note,
)
from penstock.testing import FakeClock, SimulatedDisk

NOW_US = 1_800_000_000_000_000
DAY_S = 86_400.0
IDENTITY = b"i" * 16


class WallClock:
    """The rule of before, for comparison: the wall clock, never back."""

    def __init__(self, clock: FakeClock, last_us: int = 0) -> None:
        self._clock, self._last_us = clock, last_us

    def time_us(self) -> int:
        self._last_us = max(self._last_us, self._clock.time_us())
        return self._last_us


def steady(clock: FakeClock, last_us: int = 0) -> SteadyClock:
    store = SteadyClock(clock)
    store.begin(last_us, None)
    return store


def walk(clock: FakeClock, store: SteadyClock | WallClock, steps: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """Jump and let time pass, step by step; how much time passed in each, and how much the store counted."""
    counted = []
    for jump_s, pass_s in steps:
        before_us, boot_us = store.time_us(), clock.boot_us()
        clock.jump(jump_s)
        clock.advance(pass_s)
        assert store.time_us() >= before_us
        counted.append((clock.boot_us() - boot_us, store.time_us() - before_us))
    return counted


def is_about(passed_us: int, counted_us: int) -> bool:
    return abs(counted_us - passed_us) <= passed_us // SLEW + 1


jumps = st.one_of(
    st.just(0.0),
    st.floats(-2.0, 2.0),
    st.sampled_from([-60 * 365 * DAY_S, -40 * DAY_S, -3_600.0, 3_600.0, 40 * DAY_S, 236 * 365 * DAY_S]),
)


@given(st.lists(st.tuples(jumps, st.sampled_from([0.0, 0.1, 1.0, 30.0, 3_600.0, 10 * DAY_S])), max_size=30))
def test_time_passes_as_it_passes(steps: list[tuple[float, float]]) -> None:
    clock = FakeClock(time_us=NOW_US)
    assert all(is_about(*step) for step in walk(clock, steady(clock), steps))


@pytest.mark.parametrize(
    "steps",
    [
        [(40 * DAY_S, 1.0)],
        [(-40 * DAY_S, 1.0)],
        [(40 * DAY_S, 1.0), (-40 * DAY_S, 1.0)],
    ],
    ids=["ahead", "back", "ahead and corrected"],
)
def test_the_rule_of_before_fails(steps: list[tuple[float, float]]) -> None:
    clock = FakeClock(time_us=NOW_US)
    assert not all(is_about(*step) for step in walk(clock, WallClock(clock), steps))


def test_a_clock_that_was_set_right_is_followed() -> None:
    clock = FakeClock(time_us=NOW_US)
    store = steady(clock)
    for jump_s in (3_600.0, -3_600.0):
        clock.jump(jump_s)
        for _ in range(11 * 60):
            clock.advance(60.0)
            store.time_us()
        assert store.time_us() == clock.time_us()
        assert store.wall_ahead_us == 0


@pytest.mark.parametrize("wall_us", [0, -5, 10**30, -(10**30), LATEST_US * 2])
def test_no_wall_clock_is_too_wrong(wall_us: int) -> None:
    clock = FakeClock(time_us=wall_us)
    for last_us in (0, NOW_US):
        store = steady(clock, last_us)
        assert last_us <= store.time_us() <= LATEST_US
        clock.advance(1.0)
        assert 0 <= store.time_us() <= LATEST_US + 2_000_000


def test_a_clock_that_was_never_set_takes_the_first_that_was() -> None:
    clock = FakeClock(time_us=5_000_000)
    store = steady(clock)
    clock.advance(30.0)
    assert store.time_us() == 35_000_000
    clock.jump(NOW_US / 1_000_000)
    clock.advance(1.0)
    assert store.time_us() == clock.time_us()


# -- opening


@pytest.mark.parametrize(
    ("off_s", "up_s", "jump_s", "counted_s"),
    [
        (8 * 3_600.0, 10.0, 0.0, 8 * 3_600.0),  # a night
        (30 * DAY_S, 10.0, 0.0, DAY_S),  # a month: no more than a day before the clock can have been set
        (30 * DAY_S, 3_600.0, 0.0, 30 * DAY_S),
        (60.0, 10.0, 40 * DAY_S, DAY_S),  # the clock came up wrong
        (60.0, 10.0, -60 * 365 * DAY_S, 0.0),  # a battery is empty
        (60.0, 3_600.0, -60 * 365 * DAY_S, 0.0),
        (60.0, 3_600.0, 236 * 365 * DAY_S, 0.0),  # nobody closes a store for so long
    ],
)
def test_opening_after_a_boot(off_s: float, up_s: float, jump_s: float, counted_s: float) -> None:
    clock = FakeClock(time_us=NOW_US)
    note = TimeNote(NOW_US, clock.boot_us(), clock.boot_id())
    clock.reboot(off_s=off_s, up_s=up_s)
    clock.jump(jump_s)
    for last_note in (note, None):
        opened_us = opening_time_us(NOW_US, last_note, clock, trust=False)
        assert counted_s <= (opened_us - NOW_US) / 1_000_000 <= counted_s + (up_s if 0 < counted_s != DAY_S else 0)
    assert opening_time_us(NOW_US, note, clock, trust=True) == max(NOW_US, min(clock.time_us(), LATEST_US))


@pytest.mark.parametrize("jump_s", [-60 * 365 * DAY_S, -3_600.0, 0.0, 3_600.0, 40 * DAY_S, 236 * 365 * DAY_S])
def test_opening_within_one_boot_counts_what_passed(jump_s: float) -> None:
    clock = FakeClock(time_us=NOW_US)
    note = TimeNote(NOW_US, clock.boot_us(), clock.boot_id())
    clock.advance(500.0)
    clock.jump(jump_s)
    assert opening_time_us(NOW_US - 7_000_000, note, clock, trust=False) == NOW_US + 500_000_000
    assert opening_time_us(NOW_US + DAY_US, note, clock, trust=False) == NOW_US + DAY_US  # never before a record


@given(st.lists(st.tuples(jumps, st.sampled_from([0.0, 1.0, 3_600.0]), st.booleans()), max_size=12))
def test_openings_in_between_change_nothing(steps: list[tuple[float, float, bool]]) -> None:
    disk, clock = SimulatedDisk(), FakeClock(time_us=NOW_US)
    disk.mkdir("/d")
    store = steady(clock)
    for jump_s, pass_s, reopen in steps:
        store.save_note(disk, "/d/TIME", IDENTITY)
        before_us, boot_us = store.time_us(), clock.boot_us()
        clock.jump(jump_s)
        clock.advance(pass_s)
        if reopen:
            store = SteadyClock(clock)
            store.begin(before_us, read_note(disk, "/d/TIME", IDENTITY))
        passed_us = clock.boot_us() - boot_us
        assert abs(store.time_us() - before_us - passed_us) <= passed_us // SLEW + 1_000_001  # the note may be 1 s off


# -- the note


def test_a_note_reads_as_it_was_written_or_not_at_all() -> None:
    note = TimeNote(NOW_US, 5, b"boot")
    data = note.encode(IDENTITY)
    assert TimeNote.decode(data, IDENTITY) == note
    assert TimeNote.decode(data, b"o" * 16) is None
    for at in range(len(data)):
        assert TimeNote.decode(data[:at], IDENTITY) is None
        flipped = bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])
        assert TimeNote.decode(flipped, IDENTITY) is None


def test_a_jump_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = SimulatedDisk(), FakeClock(time_us=NOW_US)
    disk.mkdir("/d")
    store = steady(clock)

    def warnings() -> list[str]:
        for _ in range(5):
            clock.advance(1.0)
            store.save_note(disk, "/d/TIME", IDENTITY)
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    with caplog.at_level(logging.WARNING):
        assert warnings() == []
        clock.jump(3_600.0)
        (warning,) = warnings()
        assert "ahead of the store's time" in warning
        clock.jump(-7_200.0)
        (warning,) = warnings()
        assert "behind the store's time" in warning
        clock.jump(3_600.0)
        assert warnings() == []


def test_a_note_that_cannot_be_written_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    store = steady(FakeClock(time_us=NOW_US))
    store.save_note(SimulatedDisk(), "/no such folder/TIME", IDENTITY)
    assert "could not be written" in caplog.text
    assert read_note(SimulatedDisk(), "/no such folder/TIME", IDENTITY) is None


def test_this_machine_has_a_boot() -> None:
    clock = SystemClock()
    assert 0 < clock.boot_us() <= clock.boot_us()
    assert clock.boot_id() == clock.boot_id()
