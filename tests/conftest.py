"""Settings and fixtures for the whole suite.

Run by several workers, files go out whole, the slow ones first: what comes last should be short, or one worker is busy
with it when the others have ended. All of Spark's tests go to one worker: a session takes a while to start.

Temporary folders are in memory where there is room: a store that is opened, written and closed takes half the CPU time
there, most of it in syncs. Tests of the file system and of killed processes have theirs on the disk.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# A process reads the kinds of other packages once: the toy kind's package must be there before the first test asks.
sys.path.append(str(TESTS / "contract" / "accounts_package"))
IN_MEMORY, FREE_BYTES_MIN = "/dev/shm", 8 << 30
KILLED = ("backup_crashes", "manifest_kill", "queue_kill", "rollup_kill", "store_kill", "tree_kill")
ON_DISK = (
    "contract/test_file_system.py",
    "unit/host/",
    "cluster/test_cluster_faults.py",
    *(f"crash/test_{name}.py" for name in KILLED),
)
# An owner's sockets are in its folder where the path is short enough; these look at them there.
SHORT_PATHS = ("unit/test_store_folder.py", "unit/test_store_forks.py")
SLOWEST_FIRST = ("spark/", "cluster/")
BUSY, WAITING = (
    ("crash/", "model/"),
    ("unit/client/", "unit/server/"),
)  # next, in turn: one keeps a core, one rarely does
THEN = ("unit/vector/", "unit/test_", "unit/queue/", "unit/scheduler/")


_USED_BEFORE = pytest.StashKey[float]()
_cpu_s: Counter[str] = Counter()  # of each file; filled where reports are printed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print the files of tests that took the most CPU time")


def cpu_s() -> float:
    """The CPU time of this process and of those that it waited for."""
    used = (resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_USED_BEFORE] = cpu_s()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append(("cpu_s", cpu_s() - item.stash[_USED_BEFORE]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        used: Any = dict(report.user_properties).get("cpu_s", 0.0)
        _cpu_s[report.nodeid.partition("::")[0]] += used


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With `--cpu`: how long a run takes on idle cores, and where to make it shorter, however busy these are now."""
    if config.option.cpu:
        terminalreporter.section(
            f"{sum(_cpu_s.values()):.0f} s of CPU time, without processes that outlive their tests"
        )
        for name, used_s in _cpu_s.most_common(25):
            terminalreporter.write_line(f"{used_s:7.1f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the tests in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    is_configured = config.option.basetemp is not None or "PYTEST_DEBUG_TEMPROOT" in os.environ
    if not is_configured and os.path.isdir(IN_MEMORY) and shutil.disk_usage(IN_MEMORY).free >= FREE_BYTES_MIN:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = IN_MEMORY


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's own, or a folder on the disk, or one with a short path."""
    if _name(request.node).startswith(SHORT_PATHS):
        with tempfile.TemporaryDirectory(prefix="p-") as folder:
            yield Path(folder)
        return
    if not _name(request.node).startswith(ON_DISK) or IN_MEMORY not in str(tmp_path):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        yield Path(folder)


def _name(item: pytest.Item) -> str:
    return str(item.path.relative_to(TESTS))


def _in_order(names: list[str]) -> list[str]:
    """Return files in the order in which workers get them."""

    def below(*folders: str) -> list[str]:
        return [name for folder in folders for name in names if name.startswith(folder)]

    mixed = [name for pair in zip_longest(below(*BUSY), below(*WAITING)) for name in pair if name is not None]
    return list(dict.fromkeys([*below(*SLOWEST_FIRST), *mixed, *below(*THEN), *names]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # by hand, quick ones first are better
        ranks = {name: rank for rank, name in enumerate(_in_order(list(dict.fromkeys(map(_name, items)))))}
        items.sort(key=lambda item: ranks[_name(item)])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude what is loaded by now, all tests among it, from garbage collection: each would look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go out whole, in the order above."""
    from xdist.scheduler import LoadFileScheduling

    class SlowFilesFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "spark" if nodeid.startswith("tests/spark/") else str(super()._split_scope(nodeid))

    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would begin with the files that have the most tests
    return SlowFilesFirst(config, log)


@pytest.fixture
def quiet() -> Iterator[None]:
    """For faults that are injected by the thousand: what is logged about them is of no use."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The folder of a store whose detached owners end with the test."""
    from owner_processes import owners, until

    folder = tmp_path / "store"
    yield folder
    for pid in owners(folder):
        with suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.kill(pid, signal.SIGKILL)
    until(lambda: not owners(folder))
