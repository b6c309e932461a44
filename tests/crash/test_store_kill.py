"""A real store in a real process, killed in the middle, again and again: what it acknowledged is there, once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import store_kill_child
from store_kill_child import SETTINGS, TABLES, write

from penstock.store.store import open_store

SCRIPT = Path(store_kill_child.__file__)


def kill_rounds(root: str, rounds: int, seed: int = 2) -> None:
    chance = random.Random(seed)
    acknowledged: dict[str, set[int]] = defaultdict(set)
    first = 0
    for _ in range(rounds):
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), root, str(first)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            begun = child.stdout.readline()
            lines = [child.stdout.readline().rstrip("\n")]  # it is at work, however slow the machine is
            time.sleep(chance.uniform(0.1, 1.0))
            child.send_signal(signal.SIGKILL)
            assert begun == "open\n"
            lines += child.stdout.read().split("\n")[:-1]
        for word, producer, number in map(str.split, lines):
            assert word == "ack", f"{producer} {number} was called a duplicate"
            acknowledged[producer].add(int(number))
        first = check(root, acknowledged)


def check(root: str, acknowledged: dict[str, set[int]]) -> int:
    """Every acknowledged batch is there, every other entirely or not at all; the next number for all."""
    with open_store(root, settings=SETTINGS) as store:
        there: list[dict[str, set[int]]] = []
        for name in TABLES:
            table = store.kv(name, create=False)
            marks: dict[str, set[int]] = defaultdict(set)
            for key, value in table.scan(prefix=b"mark "):
                _, producer, number = key.decode().split()
                assert value == b"%d" % int(number) * 20
                marks[producer].add(int(number))
            for producer, numbers in marks.items():
                assert int.from_bytes(table[b"n " + producer.encode()], "little") == len(numbers)
            there.append(dict(marks))
        assert there[0] == there[1] == there[2]
        for producer, numbers in acknowledged.items():
            assert numbers <= there[0].get(producer, set())
        first = 1 + max((max(numbers) for numbers in there[0].values()), default=-1)
        for producer, numbers in there[0].items():
            for last in sorted(numbers)[-3:]:
                assert write(store, producer, last), "a token is unknown whose data is there"
    return first


def test_killed_in_the_middle(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 3)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 100)
