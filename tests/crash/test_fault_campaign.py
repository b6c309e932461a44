"""Real processes whose system calls fail and that are killed: nothing is lost, doubled, torn or hanging.

`PENSTOCK_SEED=7 PENSTOCK_ROUNDS=40-48 make exhaustive PYTEST_ARGS="-k any_call"` runs some rounds of one seed again.
"""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from faults.campaign import Campaign, Report
from faults.plan import CALLS, Round, draw_round, draw_rounds
from faults.shim import ENVIRONMENT, Rule, Shim, build, find_compiler

FAULTS, KILLS = 500, 200
ROUNDS_MAX = 600
RARE = {("rename", "folder"), ("unlink", "queue"), ("unlink", "spill")}  # only while a table is removed

pytestmark = pytest.mark.skipif(
    find_compiler() is None or sys.platform != "linux",
    reason="the shim that makes system calls fail needs Linux and a C compiler (cc)",
)


def run(folder: Path, seed: int, plans: Iterable[Round], bug: str = "") -> Report:
    """Run rounds; with a bug, until it is seen."""
    report = Campaign(folder, seed, bug=bug).run(plans, lambda report: bool(bug and report.violations))
    print(report.show())
    return report


def quiet(number: int, *rules: Rule) -> Round:
    """A round of an owner in which only these rules hold, and nobody is killed from outside."""
    return replace(
        draw_round(1, number),
        mode="owner", rules=rules, owner_kill_s=None, client_kill_s=None, ending="heal", steps=40, faults_at_open=False,
        compacts=False, kills_reader=False,
    )  # fmt: skip


# -- the shim


SCRIPT = """
import os, sys
path = sys.argv[1]
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"old!", 0)
os.fsync(fd)
os.pwrite(fd, b"new!", 0)
try:
    os.fdatasync(fd)
except OSError as error:
    print(error.errno)
print(os.pread(fd, 9, 0).decode())
try:
    print(os.pwrite(fd, b"12345678", 4))
except OSError as error:
    print(error.errno)
print(os.pread(fd, 99, 0).decode())
"""


def steered(folder: Path, *rules: Rule) -> tuple[list[str], int, Shim]:
    shim, root = Shim(folder / "block", create=True), folder / "root"
    (root / "journal").mkdir(parents=True)
    shim.begin(str(root), rules)
    environment = shim.environment(build(folder))
    assert environment[ENVIRONMENT] == str(folder / "block")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root / "journal" / "1.log")],
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return ended.stdout.split(), ended.returncode, shim


def test_calls_fail_as_told(tmp_path: Path) -> None:
    half = Rule("pwrite", "journal", "half", errno.ENOSPC, after=3)
    output, code, shim = steered(tmp_path, Rule("fdatasync", "journal", "lost", errno.EIO), half)
    assert code == 0
    assert output == ["5", "old!", "28", "old!1234"]
    assert [(fault.call, fault.kind, fault.component) for fault in shim.faults()] == [
        ("fdatasync", "EIO", "journal"), ("pwrite", "ENOSPC", "journal"),
    ]  # fmt: skip
    assert shim.call_counts()["pwrite", "journal"] == 3


def test_a_write_is_short_and_other_components_go_on(tmp_path: Path) -> None:
    other = Rule("pwrite", "sstable", "fail", errno.EIO)
    output, _, shim = steered(tmp_path, Rule("pwrite", "journal", "short", after=3), other)
    assert output == ["new!", "4", "new!1234"]
    assert [fault.kind for fault in shim.faults()] == ["short"]


def test_a_kill_loses_what_is_not_synced(tmp_path: Path) -> None:
    output, code, shim = steered(tmp_path, Rule("fdatasync", "journal", "kill lost", 0))
    assert code == -9
    assert output == []
    assert (tmp_path / "root" / "journal" / "1.log").read_bytes() == b"old!"
    assert [fault.kind for fault in shim.faults()] == ["kill lost"]


# -- bugs that must be seen


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ("ignore_failed_sync", Rule("fdatasync", "journal", "lost", errno.EIO, after=20, times=3)),
        ("never_sync", Rule("pwrite", "journal", "kill lost", 0, after=25)),
        ("forget_tokens", Rule("pwrite", "journal", "short", after=5)),
    ],
)
def test_a_seeded_bug_is_seen(tmp_path: Path, bug: str, rule: Rule) -> None:
    report = run(tmp_path, 1, [quiet(0, rule), quiet(1, rule)], bug)
    assert report.violations
    (tmp_path / "sound").mkdir()
    clean = run(tmp_path / "sound", 1, [quiet(0, rule)])
    assert clean.violations == []
    # The fault happened, so `after` is not larger than the number of such calls in a round.
    assert (rule.call, rule.component) in report.reached() & clean.reached()


# -- the campaign


def test_some_rounds(tmp_path: Path) -> None:
    """Quick ones: nobody waits for an owner that does not come up."""
    plans = [replace(draw_round(3, number), mode="owner") for number in (0, 1, 4, 5, 6, 7)]
    kill = Rule("pwrite", "journal", "kill half", 0, after=25)
    report = run(tmp_path, 3, [*plans, replace(quiet(8, kill), mode="served", steps=15)])
    assert report.violations == []
    assert report.struck >= 4  # a rule that waits for a call which does not come in a short round strikes nothing
    assert report.kill_count >= 2


def chosen_rounds() -> range:
    first, _, last = os.environ.get("PENSTOCK_ROUNDS", f"0-{ROUNDS_MAX}").partition("-")
    return range(int(first), int(last))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_any_call_may_fail_and_anybody_die(tmp_path: Path) -> None:
    seed, rounds = int(os.environ.get("PENSTOCK_SEED", secrets.randbelow(1 << 32))), chosen_rounds()
    print(f"PENSTOCK_SEED={seed}")
    calls = CALLS.keys() - RARE

    def is_enough(report: Report) -> bool:
        return report.struck >= FAULTS and report.kill_count >= KILLS and calls <= report.reached()

    report = Campaign(tmp_path, seed).run(draw_rounds(seed, rounds), is_enough)
    print(report.show())
    assert report.violations == [], f"seed {seed}"
    if len(rounds) == ROUNDS_MAX:
        assert report.struck >= FAULTS
        assert report.kill_count >= KILLS
        assert calls - report.reached() == set(), "these calls never failed"
        for error in ("EIO", "ENOSPC", "EMFILE", "short", "kill", "kill half", "kill lost"):
            assert any(kind == error for _, kind, _ in report.faults), f"{error} never happened"
        assert report.modes.keys() == {"owner", "served", "detached"}
        assert all(report.outcomes[word] for word in ("done", "duplicate", "refused", "unknown", "written"))
