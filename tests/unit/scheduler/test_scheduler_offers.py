"""The offer board: who gets an offer, who may answer it, and what becomes of one that nobody does."""

from __future__ import annotations

import random

import pytest

from penstock.errors import Backpressure, Closed, Invalid, WaitExpired
from penstock.scheduler.engines import Engines
from penstock.scheduler.offers import JobPart, OfferBoard, OfferSettings
from penstock.scheduler.work import WorkCancelled, WorkerLost, WorkFailed, pack, unpack
from penstock.testing import FakeClock

FUNCTION = "penstock.lsm.merge_offers:merge_part"


class Desk:
    """A board and its clock."""

    def __init__(self, **settings: float) -> None:
        self.clock = FakeClock()
        self.board = OfferBoard(
            clock=self.clock,
            random=random.Random(1),
            settings=OfferSettings(silence_s=15.0, **settings),  # type: ignore[arg-type]
        )


@pytest.fixture
def desk() -> Desk:
    return Desk()


def parts(count: int) -> list[JobPart]:
    return [
        JobPart(arguments=pack({"n": n}), reads=(f"in{n}", f"in{n}.idx"), writes=(f"out{n}",)) for n in range(count)
    ]


def test_an_offer_is_taken_once_and_answered_once(desk: Desk) -> None:
    board = desk.board
    handle = board.submit_parts(FUNCTION, parts(3))
    offer = board.take(4)
    assert offer is not None
    assert [unpack(part.arguments) for part in offer.parts] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert offer.function == FUNCTION
    assert board.take(4) is None
    with pytest.raises(WaitExpired):
        handle.result(0.0)
    assert board.has_taken_offers()
    assert board.finish(offer.offer, [pack([n]) for n in range(3)])
    assert handle.result(0.0) == [[0], [1], [2]]
    assert not board.finish(offer.offer, [pack([9])] * 3)
    assert not board.renew(offer.offer)
    assert not board.has_taken_offers()
    assert handle.result(0.0) == [[0], [1], [2]]


def test_it_is_an_engine(desk: Desk) -> None:
    engines = Engines({})
    engines.add("spark", lambda: desk.board)
    handle = engines.get("spark").submit(FUNCTION, {"n": 7})
    offer = desk.board.take(1)
    assert offer is not None
    assert unpack(offer.parts[0].arguments) == {"n": 7}
    assert desk.board.finish(offer.offer, [pack("done")])
    assert handle.result(0.0) == "done"
    waiting = engines.get("spark").submit(FUNCTION, {})
    assert engines.shutdown(0.0)
    with pytest.raises(WorkCancelled):
        waiting.result(0.0)
    with pytest.raises(Closed):
        desk.board.submit(FUNCTION, {})


def test_a_driver_counts_for_as_long_as_it_is_heard(desk: Desk) -> None:
    assert desk.board.slots() == 0
    desk.board.take(6)
    assert desk.board.slots() == 6
    desk.clock.advance(14.9)
    assert desk.board.slots() == 6
    desk.clock.advance(0.2)
    assert desk.board.slots() == 0


def test_an_offer_that_nobody_takes_is_withdrawn(desk: Desk) -> None:
    handle = desk.board.submit_parts(FUNCTION, parts(1))
    desk.clock.advance(15.1)
    with pytest.raises(WaitExpired):
        handle.result(0.0)  # this look withdraws it
    with pytest.raises(WorkerLost, match="did not take it"):
        handle.result(0.0)
    assert desk.board.take(1) is None


def test_a_driver_that_falls_silent_has_lost_it(desk: Desk) -> None:
    board = desk.board
    handle = board.submit_parts(FUNCTION, parts(1))
    offer = board.take(1)
    assert offer is not None
    for _ in range(5):  # much longer than the silence in all
        desk.clock.advance(10.0)
        assert board.renew(offer.offer)
        with pytest.raises(WaitExpired):
            handle.result(0.0)
    desk.clock.advance(15.1)
    with pytest.raises(WaitExpired):
        handle.result(0.0)
    with pytest.raises(WorkerLost, match="went silent"):
        handle.result(0.0)
    assert not board.renew(offer.offer)
    assert not board.finish(offer.offer, [pack([])])  # it wakes up: too late
    with pytest.raises(WorkerLost):
        handle.result(0.0)


def test_no_offer_lasts_for_ever() -> None:
    desk = Desk(work_s_max=60.0)
    handle = desk.board.submit_parts(FUNCTION, parts(1))
    offer = desk.board.take(1)
    assert offer is not None
    for _ in range(7):
        desk.clock.advance(10.0)
        desk.board.renew(offer.offer)
    with pytest.raises(WaitExpired):
        handle.result(0.0)
    with pytest.raises(WorkerLost, match="took too long"):
        handle.result(0.0)


def test_a_failure_and_a_cancellation_are_told(desk: Desk) -> None:
    failed, cancelled = desk.board.submit_parts(FUNCTION, parts(1)), desk.board.submit_parts(FUNCTION, parts(1))
    offer, other = desk.board.take(1), desk.board.take(1)
    assert offer is not None
    assert other is not None
    desk.board.fail(offer.offer, "an executor was lost")
    with pytest.raises(WorkFailed, match="an executor was lost"):
        failed.result(0.0)
    cancelled.cancel()
    with pytest.raises(WorkCancelled):
        cancelled.result(0.0)
    assert not desk.board.renew(other.offer)


@pytest.mark.parametrize("results", [[], [pack(1), pack(2)], [b"\xc1"]])
def test_results_that_do_not_fit_are_a_loss(desk: Desk, results: list[bytes]) -> None:
    handle = desk.board.submit_parts(FUNCTION, parts(1))
    offer = desk.board.take(1)
    assert offer is not None
    assert not desk.board.finish(offer.offer, results)
    with pytest.raises(WorkerLost, match="cannot be used"):
        handle.result(0.0)


def test_only_the_files_of_an_offer_that_is_worked_on_are_lent(desk: Desk) -> None:
    board = desk.board
    handle = board.submit_parts(FUNCTION, parts(2))
    offer = board.take(1)
    assert offer is not None
    board.check_file(offer.offer, "in1.idx", write=False)
    board.check_file(offer.offer, "out0", write=True)
    for name, write in (("in0", True), ("out0", False), ("../STORE", False), ("", True)):
        with pytest.raises(Invalid, match="this offer does not"):
            board.check_file(offer.offer, name, write=write)
    handle.cancel()
    with pytest.raises(Invalid, match="withdrawn"):
        board.check_file(offer.offer, "in0", write=False)


def test_the_board_is_bounded_and_its_settings_checked() -> None:
    desk = Desk(waiting_max=2)
    for _ in range(2):
        desk.board.submit_parts(FUNCTION, parts(1))
    with pytest.raises(Backpressure, match="2 offers"):
        desk.board.submit_parts(FUNCTION, parts(1))
    with pytest.raises(Invalid):
        desk.board.submit_parts(FUNCTION, [])
    with pytest.raises(Invalid):
        desk.board.take(0)
    with pytest.raises(Invalid):
        desk.board.submit("no name", {})
    for wrong in ({"waiting_max": 0}, {"silence_s": 0.0}, {"work_s_max": float("inf")}):
        with pytest.raises(Invalid):
            OfferSettings(**wrong)
