"""The offer board over the wire: who may use it, and which files it lends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.errors import Invalid
from penstock.protocol import wire
from penstock.scheduler.offers import JobPart, OfferBoard
from penstock.scheduler.work import pack
from penstock.server.offer_requests import OfferRequests
from penstock.server.rights import LOCAL, Rights
from penstock.server.work import Workload
from penstock.testing import FakeClock, SimulatedDisk

FUNCTION = "penstock.lsm.merge_offers:merge_part"


class Owner:
    """A board with one offer on it, a disk, and the desk between them and a client."""

    def __init__(self) -> None:
        self.board = OfferBoard(clock=FakeClock(), random=random.Random(1))
        self.disk = SimulatedDisk()
        self.disk.mkdir("/store")
        for name, data in (("in", b"input" * 2_000_000), ("secret", b"no")):
            file = self.disk.create(f"/store/{name}")
            file.pwrite(data, 0)
            file.close()
        self.desk = OfferRequests(self.board, self.disk, "/store")
        self.handle = self.board.submit_parts(FUNCTION, [JobPart(arguments=pack({}), reads=("in",), writes=("out",))])

    def ask(self, request: Any, rights: Rights = LOCAL) -> Any:
        sent = wire.unpack_request(wire.pack(request))  # as it goes over the wire
        with Workload(FakeClock()).admit(rights, 1) as work:
            return self.desk.answers[type(sent)](sent, work)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_files_go_there_and_back_in_pieces(owner: Owner) -> None:
    (offer,) = owner.ask(wire.TakeOffer(2))
    assert owner.ask(wire.TakeOffer(2)) == []
    data = b""
    while piece := owner.ask(wire.ReadOffered(offer.offer, "in", len(data))):
        assert len(piece) <= wire.PIECE_BYTES
        data += piece
    assert data == b"input" * 2_000_000
    owner.ask(wire.WriteOffered(offer.offer, "out", 0, b"half of it"))
    owner.ask(wire.WriteOffered(offer.offer, "out", 0, b"one "))  # sent anew
    owner.ask(wire.WriteOffered(offer.offer, "out", 4, b"two"))
    with pytest.raises(Invalid, match="has 7 bytes"):
        owner.ask(wire.WriteOffered(offer.offer, "out", 9, b"gap"))
    assert owner.disk.open("/store/out").pread(100, 0) == b"one two"
    assert owner.ask(wire.KeepOffer(offer.offer))
    assert owner.ask(wire.FinishOffer(offer.offer, [pack([5])]))
    assert owner.handle.result(0.0) == [[5]]
    assert not owner.ask(wire.KeepOffer(offer.offer))


@pytest.mark.parametrize("name", ["secret", "../store/in", "/store/in", "in\0", ""])
def test_no_other_file_is_lent(owner: Owner, name: str) -> None:
    (offer,) = owner.ask(wire.TakeOffer(2))
    for request in (
        wire.ReadOffered(offer.offer, name, 0),
        wire.WriteOffered(offer.offer, name, 0, b"x"),
        wire.WriteOffered(offer.offer, "in", 0, b"x"),
        wire.ReadOffered(offer.offer, "out", 0),
        wire.ReadOffered("another", "in", 0),
        wire.ReadOffered(offer.offer, "in", -1),
    ):
        with pytest.raises(Invalid):
            owner.ask(request)
    assert owner.disk.open("/store/in").pread(5, 0) == b"input"


def test_a_withdrawn_offer_lends_and_takes_nothing(owner: Owner) -> None:
    (offer,) = owner.ask(wire.TakeOffer(2))
    owner.handle.cancel()
    with pytest.raises(Invalid, match="withdrawn"):
        owner.ask(wire.WriteOffered(offer.offer, "out", 0, b"x"))
    assert not owner.disk.exists("/store/out")
    assert not owner.ask(wire.FinishOffer(offer.offer, [pack([5])]))
    owner.ask(wire.FailOffer(offer.offer, "late"))  # is nobody's concern


@pytest.mark.parametrize("tables", [{}, {"*": "read"}, {"*": "write"}, {"t": "admin"}])
def test_it_takes_the_right_to_everything(owner: Owner, tables: Any) -> None:
    rights = Rights(client="some", tables=tables)
    for request in (
        wire.TakeOffer(1),
        wire.KeepOffer("x"),
        wire.FinishOffer("x", []),
        wire.FailOffer("x", ""),
        wire.ReadOffered("x", "in", 0),
        wire.WriteOffered("x", "out", 0, b""),
    ):
        with pytest.raises(Invalid, match="does not give the right"):
            owner.ask(request, rights)
