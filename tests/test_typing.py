"""What a type checker tells a user of the public API: precise types, no `Any`, and mistakes are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "surface" / "user_program.py"

# Each line is wrong; the comment is the code of the error that mypy must report there.
MISTAKES = """\
# mypy: disallow-any-expr
import penstock

store = penstock.open("data")
totals = store.kv("totals", value="int64")
totals.put(b"a", "1")  # arg-type
totals.put("a", 1)  # arg-type
totals[b"a"] + "x"  # operator
name: str = totals.get(b"a")  # assignment
store.kv("t", value="int32")  # call-overload
store.kv("t").put(b"a", 1)  # arg-type
with store.batch() as batch:
    batch.kv("t").put(b"a", 1)  # arg-type
with store.snapshot() as snapshot:
    snapshot.kv("totals", value="int64").put(b"a", 1)  # attr-defined
store.queue("q").put("text")  # arg-type
store.queue("q", retention=3600)  # arg-type
store.load("t", [1, 2])  # arg-type
store.flush("now")  # arg-type
penstock.nothing  # attr-defined
print(totals.schema)  # misc
"""


def check(*files: Path) -> list[tuple[str, int, str]]:
    """The errors that mypy reports in these files, with the project's settings: (file, line, code)."""
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-pretty", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    errors = re.findall(r"^(.*?):(\d+)(?::\d+)?: error: .*\[([a-z-]+)\]$", ran.stdout, re.MULTILINE)
    return [(Path(name).name, int(line), code) for name, line, code in errors]


def test_types_are_precise_and_mistakes_are_found(tmp_path: Path) -> None:
    wrong = tmp_path / "mistakes.py"
    wrong.write_text(MISTAKES)
    expected = [
        (number, code) for number, line in enumerate(MISTAKES.splitlines(), 1) for code in re.findall("  # (.+)$", line)
    ]
    errors = check(PROGRAM, wrong)
    assert [error for error in errors if error[0] == PROGRAM.name] == []
    actual = {(line, code) for name, line, code in errors if name == wrong.name}
    assert [mistake for mistake in expected if mistake not in actual] == []


def test_the_program_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(PROGRAM), str(tmp_path / "data")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "there is no table missing" in ran.stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "penstock" / "py.typed").exists()
