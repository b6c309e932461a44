"""A store with small queue files on a simulated disk, and ways to look at its queues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
from store_model import SETTINGS, open_simulated

from penstock.host.files import FileSystem
from penstock.partition.reference import StagedFile, sealed
from penstock.queue import QueueSettings
from penstock.queue.machine import QueueMachine
from penstock.queue.staged import STAGED_SCHEMA
from penstock.queue.table import QueueTable
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

SMALL_FILES = QueueSettings(file_bytes=1_600, allocate_bytes=512, index_bytes=128)
QUEUE_SETTINGS = replace(SETTINGS, kinds=(SMALL_FILES,))


def open_queues(disk: SimulatedDisk, clock: FakeClock | None = None) -> Store:
    return open_simulated(disk, clock, QUEUE_SETTINGS)


def machine_of(store: Store, name: str, shard: int = 0) -> QueueMachine:
    info = store._ledger.table(name)
    assert info is not None
    machine = store._port.machine(info.table_id << 16 | shard)  # type: ignore[arg-type]
    assert isinstance(machine, QueueMachine)
    return machine


def contents(table: QueueTable) -> list[dict[int, bytes]]:
    """For each shard, what can be read: payloads by sequence."""
    messages: list[dict[int, bytes]] = [{} for _ in range(table.shards)]
    for row in table.to_arrow().to_pylist():
        messages[row["shard"]][row["sequence"]] = row["payload"]
    return messages


def payloads(table: QueueTable, shard: int = 0) -> list[bytes]:
    return list(contents(table)[shard].values())


def build(fs: FileSystem, root: str, staged: StagedFile, table: Any) -> StagedFile:
    """What an executor does with a staged file."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    file = fs.create(f"{root}/{staged.file_name}")
    file.pwrite(out.getvalue().to_pybytes(), 0)
    file.close()
    return sealed(fs, root, staged)


def staged_table(*payloads: bytes, time_us: int = 0) -> Any:
    count = len(payloads)
    columns = [
        pa.array(payloads, pa.binary()),
        pa.nulls(count, pa.binary()),
        pa.array([time_us] * count, STAGED_SCHEMA.field("time").type),
    ]
    return pa.table(columns, schema=STAGED_SCHEMA)
