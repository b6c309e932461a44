"""Offers over the wire: drivers take work, renew it, deliver results, and transfer files they cannot access.

Thread: any.
Invariant: only files that an offer names are transferred, and only while a driver holds the offer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import Invalid
from penstock.host.files import FileSystem
from penstock.protocol import wire
from penstock.scheduler.offers import Offer, OfferBoard
from penstock.server.rights import ADMIN
from penstock.server.work import Work


class OfferRequests:
    """Answers the requests of drivers."""

    def __init__(self, board: OfferBoard, fs: FileSystem, root: str) -> None:
        self._board = board
        self._fs = fs
        self._root = root
        self.answers: dict[type, Callable[[Any, Work], Any]] = {
            wire.TakeOffer: self._take,
            wire.KeepOffer: lambda request, work: self._of(work).renew(request.offer),
            wire.FinishOffer: lambda request, work: self._of(work).finish(request.offer, request.results),
            wire.FailOffer: lambda request, work: self._of(work).fail(request.offer, request.reason),
            wire.ReadOffered: self._read,
            wire.WriteOffered: self._write,
        }

    def _of(self, work: Work) -> OfferBoard:
        work.rights.check_everywhere(ADMIN)  # an offer reads and writes raw files, of any table
        return self._board

    def _take(self, request: wire.TakeOffer, work: Work) -> list[Offer]:
        offer = self._of(work).take(request.slots)
        return [] if offer is None else [offer]

    def _read(self, request: wire.ReadOffered, work: Work) -> bytes:
        self._of(work).check_file(request.offer, request.name, write=False)
        if request.offset < 0:
            raise Invalid(f"a file has no bytes at {request.offset}")
        file = self._fs.open(f"{self._root}/{request.name}")
        try:
            return file.pread(wire.PIECE_BYTES, request.offset)
        finally:
            file.close()

    def _write(self, request: wire.WriteOffered, work: Work) -> None:
        self._of(work).check_file(request.offer, request.name, write=True)
        path = f"{self._root}/{request.name}"
        if request.offset == 0 and self._fs.exists(path):
            self._fs.unlink(path)  # the driver sends it again
        file = self._fs.create(path) if request.offset == 0 else self._fs.open(path, write=True)
        try:
            if request.offset > file.size():
                raise Invalid(f"{request.name} has {file.size()} bytes: the next begin there, not at {request.offset}")
            file.pwrite(request.data, request.offset)
        finally:
            file.close()
