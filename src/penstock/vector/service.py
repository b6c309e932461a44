"""What the owner does for a vector table: searches of one vector without a snapshot, and the choice of probes.

A search of one vector of a table with one shard reads the live kernel, which is at the last record applied, so it needs
no snapshot. Everything else is a query: see `searching`.

Thread: any for searches; `maintain` by the owner, one at a time.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import Backpressure, Invalid
from penstock.kinds import Host, TableService, partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.vector.attributes import decode_attributes
from penstock.vector.filters import compile_condition
from penstock.vector.keys import F32
from penstock.vector.live import LiveIndex
from penstock.vector.loaded import LoadedIndex
from penstock.vector.machine import VectorMachine
from penstock.vector.options import VectorOptions, decode_vector_options
from penstock.vector.searching import Hit, check_k, check_probes
from penstock.vector.section import SQUARE_MAX, SQUARE_MIN, check_vectors
from penstock.vector.stored import read_generations, read_sequence

SEARCH = "search"
ATTEMPTS = 10  # of a search, if records of hits are deleted meanwhile


class SearchCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A search of one vector, as a client sends it."""

    vector: bytes  # float32
    k: int
    probes: int = 0  # 0: the table's own choice
    where: Any = None  # a condition as a dict


_decode = msgspec.msgpack.Decoder(SearchCall).decode
_encode = msgspec.msgpack.Encoder().encode
_new, _hits = tuple.__new__, repeat(Hit)


class VectorService(TableService):
    """The service of one table."""

    def __init__(self, info: TableInfo, host: Host) -> None:
        self._info = info
        self._host = host
        self._options = decode_vector_options(info.options)
        self._partition = partitions_of(info)[0]

    def perform(self, name: str, request: Any) -> list[Hit]:
        """Search one vector: `request` is (vector of the right length, k, probes, where)."""
        vector, k, probes, where = request
        machine: VectorMachine = self._host.machine(self._partition)
        live, square = machine.live, float(np.vdot(vector, vector))  # `dot` warns where float32 overflows
        cache = live.cache
        if not SQUARE_MIN < square < SQUARE_MAX:
            check_vectors(vector.reshape(1, -1), self._options)  # NaN, or zero with cosine
        for attempt in range(ATTEMPTS):
            loaded = live.loaded
            try:
                if loaded is None or (attempt and not loaded.index.loaded):
                    loaded = self._loaded(machine)
                    if loaded is None:
                        break
                if where is None:
                    distances, numbers = loaded.index.search_one(vector, k, probes or None, square)
                else:
                    hits = self._filtered(loaded, live, request, square)
                    if hits is None:
                        break
                    distances, numbers = hits
            except Backpressure:
                continue  # a change of the kernel failed since: load it again
            live.sample.add(vector)
            if not numbers:
                return []
            try:
                names, attributes = zip(*map(cache.records.get, numbers))  # noqa: B905
            except TypeError:  # some are not cached
                records = [cache.record(number, machine.tree.view.get) for number in numbers]
                if None in records:
                    continue  # one was deleted since the search: search again
                names, attributes = zip(*records)  # noqa: B905
            # The constructor of a Hit is a function of Python: `tuple.__new__` takes half its time.
            return list(map(_new, _hits, zip(names, distances, attributes)))  # noqa: B905
        return self._in_snapshot(machine, vector, request)

    @staticmethod
    def _loaded(machine: VectorMachine) -> LoadedIndex | None:
        """Load the kernel of a shard; None if a search should do without: see `LiveIndex.stored_lists`."""
        live, view = machine.live, machine.tree.view
        if read_generations(view).current or not live.fits(read_sequence(view).count):
            return None
        live.load()
        return live.loaded

    @staticmethod
    def _filtered(
        loaded: LoadedIndex, live: LiveIndex, request: Any, square: float
    ) -> tuple[list[float], list[int]] | None:
        """Search vectors that pass a condition; None if cached columns lack a record that the kernel has."""
        vector, k, probes, where = request
        columns = live.cache.columns
        if columns is None or columns.ceiling != loaded.ceiling:
            return None
        hits = loaded.index.search_one(vector, k, probes or None, square, live.cache.allowed(where, columns))
        return (
            hits if columns.ceiling == loaded.ceiling else None
        )  # else a record was applied meanwhile, and a part of it was seen

    @staticmethod
    def _in_snapshot(machine: VectorMachine, vector: F32, request: Any) -> list[Hit]:
        """Search without a kernel at hand, or with a new condition; or if records change faster than they are read."""
        _, k, probes, where = request
        state = machine.snapshot()
        try:
            distances, ids = state.nearest(vector.reshape(1, -1), k, probes=probes or None, where=where)
            names, attributes = state.records(ids[ids >= 0])
            texts = [text or "" for text in attributes.to_pylist()]
            rows = zip(names.to_pylist(), distances[0].tolist(), map(decode_attributes, texts), strict=False)
            return [Hit(*row) for row in rows]
        finally:
            state.close()

    def call(self, name: str, argument: bytes) -> bytes:
        return _encode(self.perform(name, check_search_call(name, argument, self._options)))

    def admit(self, name: str, argument: bytes) -> None:
        """Do nothing: a vector table has no conditions."""

    def maintain(self) -> None:
        """Load kernels that searches wait for, and choose how many lists a search looks at."""
        for partition in partitions_of(self._info):
            machine: VectorMachine | None = self._host.opened(partition)
            if machine is not None:
                machine.live.maintain()

    def has_leases(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: no call waits."""


def check_search_call(name: str, argument: bytes, options: VectorOptions) -> tuple[F32, int, int, Any]:
    """Decode and check the argument of a call; `Invalid` if it is malformed."""
    if name != SEARCH:
        raise Invalid(f"a vector table takes no call {name!r}")
    try:
        call = _decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the argument of a search does not decode: {error}") from None
    check_k(call.k)
    check_probes(call.probes or None)
    if len(call.vector) != options.vector_bytes:
        raise Invalid(f"a query vector of this table has {options.dimensions} dimensions")
    check_vectors(np.frombuffer(call.vector, "<f4").reshape(1, -1), options)
    if call.where is not None:
        compile_condition(call.where, pa.schema([]))
    return np.frombuffer(call.vector, np.float32), call.k, call.probes, call.where
