from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.manifest.jobs import JobQueue, JobSettings
from penstock.manifest.manifest import Manifest
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine


class Half:
    """Chance without surprises."""

    def randbytes(self, n: int, /) -> bytes:
        return bytes(n)

    def random(self) -> float:
        return 1.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture(params=["memory", "lmdb"])
def manifest(
    request: pytest.FixtureRequest, tmp_path: Path, disk: SimulatedDisk, clock: FakeClock
) -> Iterator[Manifest]:
    """An open manifest, on each engine."""
    if request.param == "memory":
        opened = Manifest.open("manifest", fs=disk, clock=clock, engine=MemoryEngine)
    else:
        opened = Manifest.open(str(tmp_path / "manifest"), clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def jobs(manifest: Manifest) -> JobQueue:
    return JobQueue(manifest, random=Half(), settings=JobSettings(lease_s=30.0, backoff_s=4.0, backoff_s_max=10.0))
