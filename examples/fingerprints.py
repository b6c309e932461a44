"""The fleet's fingerprints: a vector for each device that says how it read in its last window, and the odd ones.

The query on Spark writes the fingerprint of each device of a micro-batch in the same commit as its latest reading. A
device is odd if the fingerprints that are nearest to its own are far away.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

import penstock

TABLE = "fingerprints"
FEATURES = ("mean", "deviation", "minimum", "lower quartile", "median", "upper quartile", "maximum", "range")
SITES = ("north", "east", "south", "west")
NEIGHBOURS = 5
ODD_SHOWN = 3
QUERY = f"""store.vector("{TABLE}").search(matrix, k={NEIGHBOURS + 1}, where={{"site": {list(SITES)}}})"""


class OddDevice(NamedTuple):
    """A device whose neighbours are far away."""

    device: str
    distance: float  # to the last of its neighbours
    nearest: str


def create(store: penstock.Store) -> None:
    """Create the table, if it is absent."""
    store.vector(TABLE, dimensions=len(FEATURES), metric="euclidean")


def columns() -> list[Any]:
    """Return the aggregates of a device's readings that make its row; for a query on Spark."""
    from pyspark.sql import functions as F

    low, middle, high = (F.percentile("value", F.lit(share)) for share in (0.25, 0.5, 0.75))
    least, most = F.min("value"), F.max("value")
    features = [F.avg("value"), F.stddev_pop("value"), least, low, middle, high, most, most - least]
    return [
        F.array(*[feature.cast("float") for feature in features]).alias("vector"),
        F.max_by("site", F.struct("shard", "sequence")).alias("site"),
        F.max_by("n", F.struct("shard", "sequence")).alias("n"),
    ]


def check(snapshot: Any) -> tuple[int, int]:
    """Return how many devices have a fingerprint, and how many have one of another commit than their latest reading."""
    latest = {key.decode(): json.loads(value)["n"] for key, value in snapshot.kv("latest").scan()}
    prints = {device: attributes["n"] for device, _, attributes in _rows(snapshot)}
    return len(prints), sum(latest.get(device) != prints.get(device) for device in latest.keys() | prints.keys())


def _rows(store: Any) -> list[tuple[str, list[float], dict[str, Any]]]:
    """Return the device, the vector and the attributes of each fingerprint of a store or a snapshot."""
    rows = store.vector(TABLE).to_arrow().to_pylist()
    return [(row["id"], row["vector"], json.loads(row["attributes"])) for row in rows]


def odd_devices(store: penstock.Store) -> list[OddDevice]:
    """Return the devices of the fleet whose neighbours are farthest, the oddest first."""
    rows = [(device, vector) for device, vector, attributes in _rows(store) if attributes.get("site") in SITES]
    if len(rows) <= NEIGHBOURS:
        return []
    matrix = np.array([vector for _, vector in rows], np.float32)
    nearest: Any = store.vector(TABLE).search(matrix, k=NEIGHBOURS + 1, where={"site": list(SITES)})
    hits = nearest.to_pylist()
    odd = []
    for number, (device, _) in enumerate(rows):
        others = [hit for hit in hits if hit["query"] == number and hit["id"] != device]
        odd.append(OddDevice(device, others[NEIGHBOURS - 1]["distance"], others[0]["id"]))
    return sorted(odd, key=lambda device: -device.distance)[:ODD_SHOWN]


def odd_line(odd: list[OddDevice]) -> str:
    """Say which devices are odd."""
    named = ", ".join(f"{device.device} ({device.distance:.1f} from its neighbours)" for device in odd)
    return f"odd devices by their fingerprints: {named or 'too few to tell'}"
