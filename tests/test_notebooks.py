"""The notebooks run from top to bottom, import only what is public, and are kept without output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.test_docs import strangers

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> list[str]:
    """The cells of code of a notebook."""
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code_of(path), 1):
        assert strangers(source) == []
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
