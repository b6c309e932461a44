from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.host.os_files import OsFileSystem
from penstock.manifest.environment import LmdbEngine
from penstock.testing import SimulatedDisk
from penstock.testing.contracts.manifest_engine import ManifestEngineBench, ManifestEngineContract
from penstock.testing.manifest import MemoryEngine


class TestLmdbEngine(ManifestEngineContract):
    @pytest.fixture
    def engines(self, tmp_path: Path) -> Iterator[ManifestEngineBench]:
        bench = ManifestEngineBench(LmdbEngine, OsFileSystem(), str(tmp_path / "manifest"))
        yield bench
        bench.close()


class TestMemoryEngine(ManifestEngineContract):
    @pytest.fixture
    def engines(self, tmp_path: Path) -> Iterator[ManifestEngineBench]:
        bench = ManifestEngineBench(MemoryEngine, SimulatedDisk(), "manifest")
        yield bench
        bench.close()
