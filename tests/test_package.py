"""What is built: the wheel has every module and nothing of the tests, the sdist what is needed to build it again."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


def test_the_wheel_has_every_module_and_data_file_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert names == {name.removeprefix("src/") for name in tracked.stdout.split()}
    assert "penstock/py.typed" in names


def test_the_wheel_says_what_its_extras_bring(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"all", "crypto", "http", "promql", "replica", "s3", "spark", "vector"} <= extras
    readme = (ROOT / "README.md").read_text()
    assert [
        extra for extra in ("spark", "vector", "http", "replica", "s3", "crypto") if f"`{extra}`" not in readme
    ] == []


def test_the_wheel_is_built_without_what_the_tests_need(tmp_path: Path) -> None:
    """It is the first command of the tutorial; where the environment of the tests is there, nothing is installed."""
    shutil.copy(ROOT / "Makefile", tmp_path)

    def extras() -> str:
        command = ["make", "--dry-run", "--no-print-directory", "wheel"]
        lines = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
        return lines.splitlines()[0].removeprefix("sh tools/setup.sh ")

    assert extras() == "wheel"
    (tmp_path / ".venv" / "done").mkdir(parents=True)
    (tmp_path / ".venv" / "done" / "dev").touch()
    assert extras() == "dev"
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) >= {"wheel"}


def test_the_sdist_can_build_the_wheel(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "src/penstock/__init__.py",
        "tests/conftest.py",
    } <= names
    assert [name for name in names if name.startswith((".ci", ".github", ".venv"))] == []
