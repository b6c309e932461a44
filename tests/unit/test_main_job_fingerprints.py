"""The fingerprints of `make run`, without Spark: which devices are odd, and what a torn commit would show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from examples import fingerprints

import penstock
from penstock.store.settings import StoreSettings


def test_devices_far_from_their_neighbours_are_odd(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store", settings=StoreSettings(background=False)) as store:
        fingerprints.create(store)
        assert fingerprints.odd_devices(store) == []
        assert "too few" in fingerprints.odd_line([])
        chance = np.random.default_rng(1)
        matrix = (22 + chance.normal(size=(40, len(fingerprints.FEATURES)))).astype(np.float32)
        matrix[7] += 30
        devices = [f"device-{number:03d}" for number in range(40)]
        attributes = [{"site": fingerprints.SITES[number % 4], "n": number} for number in range(40)]
        store.vector(fingerprints.TABLE).upsert(devices, matrix, attributes=attributes)
        far = np.full((1, matrix.shape[1]), 9e4, np.float32)
        store.vector(fingerprints.TABLE).upsert(["this-machine"], far, attributes=[{"n": 1}])
        odd = fingerprints.odd_devices(store)
        assert odd[0].device == "device-007"  # this machine has no site, and is no device of the fleet
        assert len(odd) == fingerprints.ODD_SHOWN
        assert odd[0].distance > 2 * odd[1].distance
        assert "device-007 (" in fingerprints.odd_line(odd)


def test_a_fingerprint_of_another_commit_is_counted(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store", settings=StoreSettings(background=False)) as store:
        fingerprints.create(store)
        vectors = np.ones((3, len(fingerprints.FEATURES)), np.float32)
        store.vector(fingerprints.TABLE).upsert(["a", "b", "c"], vectors, attributes=[{"n": n} for n in (1, 2, 3)])
        for device, number in ((b"a", 1), (b"b", 5), (b"d", 1)):
            store.kv("latest").put(device, json.dumps({"n": number}).encode())
        store.flush()
        with store.snapshot() as snapshot:
            assert fingerprints.check(snapshot) == (3, 3), "b is of another commit, c and d have only one of the two"
