"""The owner of a queue, killed in the middle, again and again: each message comes, none after its acknowledgement."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import queue_kill_child
from queue_kill_child import SETTINGS, SHARDS, commit, produce

from penstock.store.store import Store, open_store

SCRIPT = Path(queue_kill_child.__file__)
LINES_MIN = 40


@dataclass
class ChildReports:
    """What the processes said so far."""

    put: set[int] = field(default_factory=set)
    acknowledged: set[tuple[str, int, int]] = field(default_factory=set)  # consumer, shard, sequence
    got: set[tuple[str, int, int]] = field(default_factory=set)

    def hear(self, line: str) -> None:
        word, *rest = line.split()
        assert word != "late", "a consumer committed after its lease was over"
        if word == "put":
            self.put.add(int(rest[0]))
            return
        position = (rest[0], int(rest[1]), int(rest[2]))
        if word == "got":
            assert position not in self.acknowledged, f"{line}: it was acknowledged"
            self.got.add(position)
        else:
            self.acknowledged.add(position)


def kill_rounds(root: str, rounds: int, seed: int = 3) -> None:
    chance, reports, first = random.Random(seed), ChildReports(), 0
    for _ in range(rounds):
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), root, str(first)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            begun = child.stdout.readline()
            lines = [child.stdout.readline() for _ in range(LINES_MIN)]  # it is at work
            time.sleep(chance.uniform(0.0, 1.5))
            child.send_signal(signal.SIGKILL)
            assert begun == "open\n"
            lines += child.stdout.read().split("\n")[:-1]
        for line in lines:
            reports.hear(line)
        with open_store(root, settings=SETTINGS) as store:
            first = check(store, reports)
    assert reports.put
    assert {name for name, _, _ in reports.acknowledged} == {"work", "audit"}
    with open_store(root, settings=SETTINGS) as store:
        work_off(store, reports)


def messages_of(store: Store) -> dict[tuple[int, int], bytes]:
    rows = store.queue("events").to_arrow().to_pylist()
    return {(row["shard"], row["sequence"]): row["payload"] for row in rows}


def check(store: Store, reports: ChildReports) -> int:
    """Every message that was told is there once, under a number that has no hole; results are there once, or not."""
    there = messages_of(store)
    numbers = [int(payload.split()[0]) for payload in there.values()]
    assert len(set(numbers)) == len(numbers), "a message is there twice"
    assert reports.put <= set(numbers)
    for shard in range(SHARDS):
        sequences = [sequence for where, sequence in there if where == shard]
        assert sequences == list(range(1, len(sequences) + 1))
    results = dict(store.kv("results").scan())
    assert set(results.values()) <= {b"x"}
    for name, shard, sequence in reports.acknowledged:
        if name == "work":
            number = there[shard, sequence].split()[0]
            assert results[b"result " + number] == b"x"
    first = 1 + max(numbers, default=-1)
    if numbers:
        produce(store, first - 1)  # its token is known
        assert messages_of(store) == there
    return first


def work_off(store: Store, reports: ChildReports) -> None:
    """What is left comes now, and then every message has come, and has one result."""
    there, queue = messages_of(store), store.queue("events")
    for name in ("work", "audit"):
        consumer = queue.consumer(name)
        while messages := consumer.get(100):
            for message in messages:
                reports.hear(f"got {name} {message.shard} {message.sequence}")
                assert message.payload == there[message.shard, message.sequence]
            if name == "work":
                commit(store, consumer, messages)
            else:
                consumer.ack(messages)
        assert consumer.lag == 0
        unseen = {(name, *position) for position in there} - reports.got
        assert not {position for position in unseen if position not in reports.acknowledged}, "never delivered"
    results = dict(store.kv("results").scan())
    assert results == {b"result " + payload.split()[0]: b"x" for payload in there.values()}


def test_killed_in_the_middle(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 3)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_fifty_times(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 50)
