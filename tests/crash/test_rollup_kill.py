"""A store with a rollup, killed during its jobs, again and again: nothing acknowledged is lost, the rollup follows."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rollup_kill_child
from rollup_kill_child import MINUTE_US, SETTINGS, T0, create

from penstock.store.store import Store, open_store

STEP_US = 5 * MINUTE_US


def kill_rounds(root: str, rounds: int, seed: int = 3) -> None:
    chance = random.Random(seed)
    first, acknowledged = 0, set[int]()
    for _ in range(rounds):
        script = str(Path(rollup_kill_child.__file__))
        with subprocess.Popen([sys.executable, script, root, str(first)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            begun = child.stdout.readline()
            lines = [child.stdout.readline().rstrip("\n")]  # it is at work, however slow the machine is
            time.sleep(chance.uniform(0.2, 1.2))
            child.send_signal(signal.SIGKILL)
            assert begun == "open\n"
            lines += child.stdout.read().split("\n")[:-1]
        acknowledged.update(int(line.split()[1]) for line in lines)
        first = check(root, acknowledged)


def check(root: str, acknowledged: set[int]) -> int:
    """Every acknowledged batch is there, others whole or not at all; the rollup holds what the source holds."""
    with open_store(root, settings=SETTINGS) as store:
        create(store)
        numbers = {round(value) for value in values(store, 'cpu{host="b"}')}
        assert acknowledged <= numbers
        assert numbers == set(range(len(numbers)))
        deleted = {number - 3 for number in numbers if number % 5 == 4}
        assert sorted(values(store, 'cpu{host="a"}')) == sorted(map(float, numbers - deleted))
        store.roll_up("rolled")
        for host, there in (("a", numbers - deleted), ("c", numbers)):
            steps: dict[int, list[float]] = {}
            for number in there:
                steps.setdefault((T0 + number * 7 * MINUTE_US) // STEP_US * STEP_US, []).append(float(number))
            for name, reduce in (("sum", sum), ("count", len), ("max", max)):
                samples = store.series("rolled").select(f'cpu:{name}{{host="{host}"}}')
                rows = zip(samples["time"].cast("int64").to_pylist(), samples["value"].to_pylist(), strict=True)
                assert dict(rows) == {time: reduce(some) for time, some in steps.items()}, (host, name)
        assert store.troubles() == []
        return len(numbers)


def values(store: Store, selector: str) -> list[float]:
    column: list[float] = store.series("metrics").select(selector)["value"].to_pylist()
    return column


def test_killed_during_rollups(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 1)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_during_rollups_many_times(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 40)
