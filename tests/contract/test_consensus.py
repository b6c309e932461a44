from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.host.clock import SystemClock
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.journal.consensus import Alone, Consensus
from penstock.log import Log, LogSettings
from penstock.replica.replicated import NoLink, Replicated
from penstock.replica.state import StateFile
from penstock.testing import Fault, SimulatedDisk
from penstock.testing.contracts.consensus import ConsensusBench, ConsensusContract

SETTINGS = LogSettings(segment_bytes=4 << 20, allocate_bytes=4096, index_bytes=512)


class AloneBench(ConsensusBench):
    """One machine, on a disk that forgets what was not synced."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.random = random.Random(7)

    def open(self) -> Consensus:
        return Alone(Log.open(self.disk, "/journal", random=self.random, settings=SETTINGS))

    def crash(self) -> None:
        self.disk = self.disk.image().restore("strict")

    @contextmanager
    def failing(self) -> Iterator[None]:
        faults = self.disk._faults
        self.disk._faults = {self.disk.operations + n: Fault(0, "eio").kind for n in range(1, 1000)}
        try:
            yield
        finally:
            self.disk._faults = faults

    @contextmanager
    def full(self) -> Iterator[None]:
        self.disk.capacity_bytes = self.disk._used_bytes()
        try:
            yield
        finally:
            self.disk.capacity_bytes = None


class OneMemberBench(AloneBench):
    """A cluster of one member: the same promises, by way of Raft."""

    def open(self) -> Replicated:
        log = Log.open(self.disk, "/journal", random=self.random, settings=SETTINGS)
        state = StateFile(self.disk, "/raft")
        self.opened = Replicated(
            log, state, member="a", others=(), link=NoLink(), clock=SystemClock(), random=self.random
        )
        return self.opened

    def crash(self) -> None:
        super().crash()
        self.opened.close()  # on the disk of before


class RealBench(ConsensusBench):
    """One machine, on files of the operating system, which outlives the process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.fs: FileSystem = OsFileSystem()
        self.crashed: list[Alone] = []  # not freed, so that nothing of it is tidied up

    def open(self) -> Alone:
        self.crashed.append(
            opened := Alone(Log.open(self.fs, str(self.folder), random=random.Random(), settings=SETTINGS))
        )
        return opened

    def crash(self) -> None:
        """The next `open` finds what is there."""

    @contextmanager
    def failing(self) -> Iterator[None]:
        with self.monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", _fail)
            patch.setattr(os, "fsync", _fail)
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        with self.monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", _no_room, raising=False)
            yield


def _fail(fd: int) -> NoReturn:
    raise OSError(errno.EIO, "the disk is away")


def _no_room(fd: int, offset: int, size: int) -> NoReturn:
    raise OSError(errno.ENOSPC, "no room")


class TestAlone(ConsensusContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> ConsensusBench:
        return AloneBench()


class TestOneMember(ConsensusContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> ConsensusBench:
        return OneMemberBench()


class TestAloneOnRealFiles(ConsensusContract):
    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConsensusBench:
        return RealBench(tmp_path / "journal", monkeypatch)
