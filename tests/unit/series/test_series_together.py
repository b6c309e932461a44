"""Everything at once: writers, deletes, compactions, rollups, retention and readers; and an owner that is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.series import rollups

MINUTE, HOUR = 60_000_000, 3_600_000_000
T0 = 1_700_000_000_000_000 // HOUR * HOUR
HOSTS = 3
STEP_S = 300


def rolled(samples: dict[tuple[str, int], float]) -> dict[tuple[str, str, int], float]:
    steps: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for (host, time), value in sorted(samples.items()):
        steps.setdefault((host, time // (STEP_S * 10**6) * STEP_S * 10**6), []).append((time, value))
    rollup: dict[tuple[str, str, int], float] = {}
    for (host, time), some in steps.items():
        values = [value for _, value in some]
        results = (len(values), sum(values), min(values), max(values), values[-1])
        rollup |= {(f"cpu:{name}", host, time): float(v) for name, v in zip(rollups.ROLLED, results, strict=True)}
    return rollup


def contents(table: Any, selector: str) -> dict[tuple[str, str, int], float]:
    rows = table.select(selector)
    times = rows.column("time").cast("int64").to_pylist()
    return {
        (row["metric"], dict(row["labels"])["host"], time): row["value"]
        for row, time in zip(rows.to_pylist(), times, strict=True)
    }


class Writer:
    """Writes and deletes samples of one host, in any order of time, and knows what must be there."""

    def __init__(self, store: Any, host: str, seed: int) -> None:
        self.store, self.host, self.chance = store, host, random.Random(seed)
        self.samples: dict[tuple[str, int], float] = {}

    def run(self, count: int) -> None:
        table, labels = self.store.series("metrics"), {"host": self.host}
        for _ in range(count):
            first = self.chance.randrange(0, 6 * 60)
            times = T0 + MINUTE * (first + np.arange(self.chance.randrange(1, 20)))
            if self.chance.random() < 0.2:
                table.delete(f'cpu{{host="{self.host}"}}', int(times[0]), int(times[-1]) + 1)
                for time in times.tolist():
                    self.samples.pop((self.host, time), None)
                continue
            values = np.round(np.array([self.chance.random() for _ in times]) * 100)
            if self.chance.random() < 0.5:
                table.write_columns("cpu", values, labels, times=times)
            else:
                with self.store.batch() as batch:
                    for time, value in zip(times.tolist(), values.tolist(), strict=True):
                        batch.series("metrics").write("cpu", value, labels, time=time)
            self.samples |= {(self.host, t): v for t, v in zip(times.tolist(), values.tolist(), strict=True)}
            with self.store.batch() as batch:  # of two buckets, and mostly of two shards
                value = self.chance.random()
                for name, time in (("left", T0), ("right", T0 + 5 * HOUR)):
                    batch.series("metrics").write(name, value, labels, time=time)


@pytest.mark.parametrize("connected", [False, True])
def test_writers_deletes_compactions_rollups_and_readers_at_once(tmp_path: Path, connected: bool) -> None:
    failed: list[BaseException] = []
    done = threading.Event()

    def guarded(act: Any) -> threading.Thread:
        def work() -> None:
            try:
                act()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with penstock.open(tmp_path / "store") as store:
        options = penstock.SeriesOptions(bucket_s=3600, retention_s=1e11)
        store.series("metrics", shards=2, options=options)
        rollup = penstock.Rollup(source="metrics", step_s=STEP_S)
        target = store.series("rolled", options=penstock.SeriesOptions(rollup=rollup))
        other = penstock.connect(tmp_path / "store") if connected else store

        def disturb() -> None:
            while not done.wait(0.05):
                store.compact("metrics")
                store.roll_up("rolled")
                store.port.maintain()

        def read() -> None:
            while not done.wait(0.01):
                with other.snapshot() as snapshot:
                    table = snapshot.series("metrics")
                    left, right = (
                        {host: value for (_, host, _), value in contents(table, name).items()}
                        for name in ("left", "right")
                    )
                    assert left == right, "a batch was seen in part"

        writers = [Writer(other, f"h{host}", host) for host in range(HOSTS)]
        threads = [guarded(lambda writer=writer: writer.run(25)) for writer in writers]
        beside = [guarded(disturb), guarded(read)]
        for thread in threads:
            thread.join(60)
        done.set()
        for thread in beside:
            thread.join(60)
        assert not failed, failed
        expected: dict[tuple[str, int], float] = {}
        for writer in writers:
            expected |= writer.samples
        store.flush()
        assert contents(store.series("metrics"), "cpu") == {("cpu", *key): value for key, value in expected.items()}
        store.roll_up("rolled")
        assert contents(target, '{__name__=~"cpu:.*"}') == rolled(expected)
        assert store.troubles() == []
        if connected:
            other.close()


OWNER = """
import sys, threading
import numpy as np
import penstock
with penstock.open(sys.argv[1]) as store:
    source = store.series("metrics", shards=2, options=penstock.SeriesOptions(bucket_s=3600))
    rollup = penstock.Rollup(source="metrics", step_s=300)
    store.series("rolled", options=penstock.SeriesOptions(rollup=rollup))
    def roll():
        while True:
            store.roll_up("rolled")
            store.compact("metrics")
    threading.Thread(target=roll, daemon=True).start()
    for number in range(int(sys.argv[2]), 10**9):
        times = int(sys.argv[3]) + 60_000_000 * ((7 * number + np.arange(30)) % 600)
        source.write_columns("cpu", number + np.arange(30.0), {"host": f"h{number % 3}"}, times=times, durable=True)
        print(number, flush=True)
"""


def test_an_owner_that_is_killed_in_the_middle_of_rollups(tmp_path: Path) -> None:
    path, first = tmp_path / "store", 0
    expected: dict[tuple[str, int], float] = {}
    for writes in (6, 11):
        command = [sys.executable, "-c", OWNER, str(path), str(first), str(T0)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            acknowledged = [int(owner.stdout.readline()) for _ in range(writes)]
            owner.send_signal(signal.SIGKILL)
            acknowledged += map(int, owner.stdout.read().split())
        assert acknowledged == list(range(first, first + len(acknowledged)))
        first += len(acknowledged)
        with penstock.open(path) as store:
            for number in range(first):
                times = T0 + MINUTE * ((7 * number + np.arange(30)) % 600)
                for position, time in enumerate(times.tolist()):
                    expected[f"h{number % 3}", time] = float(number + position)
            samples = {key[1:]: value for key, value in contents(store.series("metrics"), "cpu").items()}
            late = T0 + MINUTE * ((7 * first + np.arange(30)) % 600)  # one more may be there, whole
            if samples != expected:
                for position, time in enumerate(late.tolist()):
                    expected[f"h{first % 3}", time] = float(first + position)
                first += 1
            assert samples == expected
            store.roll_up("rolled")
            assert contents(store.series("rolled"), '{__name__=~"cpu:.*"}') == rolled(expected)
            assert store.troubles() == []
