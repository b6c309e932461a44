"""What the owner does for a vector table: searches of one vector without a snapshot, and the choice of probes.

A search of one vector of a table with one shard reads the live kernel, which is at the last record applied, so it needs
no snapshot. Everything else is a query: see `searching`.

Thread: any for searches; `maintain` by the owner, one at a time.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.errors import Backpressure, Invalid
from penstock.kinds import Host, TableService, partitions_of
from penstock.partition.ledger import TableInfo
from penstock.vector.attributes import decode_attributes as _decode_attributes
from penstock.vector.draft import read_sequence
from penstock.vector.keys import F32
from penstock.vector.machine import VectorMachine
from penstock.vector.options import VectorOptions, decode_vector_options
from penstock.vector.searching import Hit, check_k, check_probes
from penstock.vector.section import check_vectors

SEARCH = "search"
ATTEMPTS = 10  # while records of hits are deleted at the same time
_decode = msgspec.msgpack.Decoder(tuple[bytes, int, int]).decode  # vector, k, probes (0: default)
_encode = msgspec.msgpack.Encoder().encode
_new = tuple.__new__


class VectorService(TableService):
    """The service of one table."""

    def __init__(self, info: TableInfo, host: Host) -> None:
        self._info = info
        self._host = host
        self._options = decode_vector_options(info.options)
        self._partition = partitions_of(info)[0]

    def perform(self, name: str, request: Any) -> list[Hit]:
        """Search one vector: `request` is a checked (vector as bytes, k, probes)."""
        data, k, probes = request
        machine: VectorMachine = self._host.machine(self._partition)
        live, vector = machine.live, np.frombuffer(data, np.float32)
        for _ in range(ATTEMPTS):
            index = live.index
            if index is None:
                if not live.fits(read_sequence(machine.tree.view).count):
                    break
                index = live.load()
            try:
                distances, ids = index.search_one(vector, k, probes or None)
            except Backpressure:
                continue  # a change of the kernel failed since: load it again
            numbers = ids.tolist()
            if numbers[-1] < 0:  # fewer than k: none follow
                del numbers[numbers.index(-1) :]
            records = list(map(live.records.get, numbers))
            if None in records:
                records = [live.record(number, machine.tree.view.get) for number in numbers]
                if None in records:
                    continue  # one was deleted since the search: search again
            # `tuple.__new__` makes a Hit in half the time of its constructor.
            hits = [
                _new(Hit, (record[0], distance, _decode_attributes(record[1]) if record[1] else {}))  # type: ignore[index]
                for record, distance in zip(records, distances.tolist(), strict=False)
            ]
            live.sample(vector)
            return hits
        return self._in_snapshot(machine, vector, k, probes)

    def _in_snapshot(self, machine: VectorMachine, vector: F32, k: int, probes: int) -> list[Hit]:
        """Search a shard whose kernel is too large for memory, or whose records change faster than they are read."""
        state = machine.snapshot()
        try:
            distances, ids = state.nearest(vector.reshape(1, -1), k, probes=probes or None)
            found = state.records(ids[ids >= 0].tolist())
            pairs = zip(found, distances[0].tolist(), strict=False)
            return [Hit(external, distance, _decode_attributes(data)) for (external, data), distance in pairs]
        finally:
            state.close()

    def call(self, name: str, argument: bytes) -> bytes:
        return _encode(self.perform(name, check_search_call(name, argument, self._options)))

    def admit(self, name: str, argument: bytes) -> None:
        """Do nothing: a vector table has no conditions."""

    def maintain(self) -> None:
        """Choose how many lists a search looks at, from the recall of queries that were searched."""
        for partition in partitions_of(self._info):
            machine: VectorMachine | None = self._host.opened(partition)
            if machine is not None:
                machine.live.adapt()

    def has_leases(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: no call waits."""


def check_search_call(name: str, argument: bytes, options: VectorOptions) -> tuple[bytes, int, int]:
    """Decode and check the argument of a call; `Invalid` if it is malformed."""
    if name != SEARCH:
        raise Invalid(f"a vector table takes no call {name!r}")
    try:
        data, k, probes = _decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the argument of a search does not decode: {error}") from None
    check_k(k)
    check_probes(probes or None)
    if len(data) != options.vector_bytes:
        raise Invalid(f"a query vector of this table has {options.dimensions} dimensions")
    check_vectors(np.frombuffer(data, "<f4").reshape(1, -1), options)
    return data, k, probes
