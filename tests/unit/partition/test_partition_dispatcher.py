"""The dispatcher's limits: per partition and for all, on operations and bytes, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from store_model import SETTINGS, open_simulated

from penstock.errors import Backpressure, Invalid
from penstock.kv.machine import KvMachine
from penstock.partition.admission import DispatcherSettings
from penstock.partition.machine import Entry
from penstock.testing import FakeClock, SimulatedDisk

WAITING = DispatcherSettings(attempts_max=1_000, backoff_s=1e9)


@pytest.fixture(autouse=True)
def _bad_tables_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = KvMachine.apply

    def failing(machine: KvMachine, entry: Entry) -> None:
        if machine._descriptor.name.startswith("bad"):
            raise RuntimeError("broken")
        apply(machine, entry)

    monkeypatch.setattr(KvMachine, "apply", failing)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (replace(WAITING, partition_operations_max=3), r"shard 0 of bad has 3 waiting operations \(limit 3\)"),
        (
            replace(WAITING, partition_bytes_max=900),
            r"shard 0 of bad has \d+ waiting bytes, and \d+ more \(limit 900\)",
        ),
    ],
)
def test_a_partition_that_is_behind_refuses(limits: DispatcherSettings, message: str) -> None:
    with open_simulated(SimulatedDisk(), FakeClock(), replace(SETTINGS, dispatcher=limits)) as store:
        bad, good = store.kv("bad"), store.kv("good")
        with pytest.raises(Backpressure, match=message):
            for number in range(100):
                bad.put(b"%d" % number, bytes(300), durable=True)
        assert number == (3 if limits.partition_operations_max == 3 else 2)
        good.put(b"k", b"1", durable=True)
        partition = store._dispatcher.partition(bad._partitions[0])
        marks = partition.watermarks
        assert marks.applied < marks.durable == marks.highest
        assert partition.backlog_bytes == sum(entry.size for entry in partition.backlog) > 0
        assert store._dispatcher.backlogs.behind == {partition}


@pytest.mark.parametrize("limits", [replace(WAITING, operations_max=4), replace(WAITING, bytes_max=1_200)])
def test_the_limit_for_all(limits: DispatcherSettings) -> None:
    with open_simulated(SimulatedDisk(), FakeClock(), replace(SETTINGS, dispatcher=limits)) as store:
        store.kv("good")
        tables = [store.kv(f"bad{number}") for number in range(4)]
        for table in tables:
            table.put(b"k", bytes(300), durable=True)
        with pytest.raises(Backpressure, match="wait to be applied"), store.batch() as batch:
            batch.kv("good").put(b"k", b"")
        store.drop("bad0")
        store.drop("bad1")
        with store.batch() as batch:
            batch.kv("good").put(b"k", b"")


@pytest.mark.parametrize(
    "wrong",
    [
        {"operations_max": 0},
        {"partition_bytes_max": 0},
        {"attempts_max": 0},
        {"backoff_s": -1.0},
        {"stall_s": 0},
        {"workers": 33},
        {"partition_age_s_max": 0},
        {"partition_lag_max": 0},
        {"signal": "text"},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        DispatcherSettings(**wrong)
