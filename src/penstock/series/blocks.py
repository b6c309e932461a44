"""Sample blocks: the samples of a group of series in one bucket, as compressed columns with a directory.

A block is a header, a directory and chunks (`docs/format/series.md`). A *run* is the samples of one series in one
chunk of values. A series of 1,000 samples or more has chunks of its own, of at most 8,000 samples; shorter ones stand
side by side in one chunk. Series that were sampled at the same times share one column of times. A reader decodes only
the chunks that it needs. A block may also hold *tombstones*: deletes of samples in older blocks of the group.

Thread: pure functions; blocks are immutable.
Invariants: (1) samples are sorted by id, then time, and (id, time) is unique. (2) equal samples and tombstones give
equal bytes. (3) values are bit-exact, NaN payloads included.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import pyarrow as pa
from pcodec import ChunkConfig
from pcodec.standalone import simple_compress, simple_decompress_into

from penstock.errors import CorruptionError
from penstock.series.samples import I64, NO_SAMPLES, NO_TOMBSTONES, U32, U64, Flags, Samples, SampleSteps, Tombstones

VERSION = 1
CHUNK_SAMPLES_MIN = 1_000  # a series with fewer shares a chunk with its neighbours
CHUNK_SAMPLES_MAX = 8_000
COUNT_MAX = 1 << 16  # of a run or a chunk, in any version
DIRECTORY_BYTES_MAX = 1 << 28

TIMES, FLOAT64 = 0, 1  # the type of a chunk; others are reserved
PCODEC, PROGRESSION = 1, 2  # the encoding of a chunk

_HEADER = struct.Struct("<BBHIIIIII")  # version, directory's codec, 0, runs, columns, chunks, tombstones, sizes
assert _HEADER.size == 28
_PROGRESSION = struct.Struct("<qq")  # first time, step
_RAW, _ZSTD = 0, 1
_RUN_COLUMNS = (  # of the directory, in this order
    ("id", "<u4"),
    ("count", "<u4"),
    ("time_column", "<u4"),
    ("chunk", "<u4"),  # of its values
    ("nans", "<u4"),
    ("first_time", "<i8"),
    ("last_time", "<i8"),
    ("sum", "<f8"),  # of the values that are not NaN, as minimum and maximum
    ("minimum", "<f8"),
    ("maximum", "<f8"),
    ("first", "<u8"),  # bits of the first value
    ("last", "<u8"),
)
_CHUNK_COLUMNS = (("type", "<u4"), ("encoding", "<u4"), ("count", "<u4"), ("bytes", "<u4"))
_COLUMN_COLUMNS = (("count", "<u4"), ("chunk", "<u4"))
_TOMBSTONE_COLUMNS = (("id", "<u4"), ("start", "<i8"), ("end", "<i8"))
_CONFIG = ChunkConfig(compression_level=8)
_zstd = pa.Codec("zstd", compression_level=3)


class RunSummaries(NamedTuple):
    """What the directories of blocks say of runs, which hold no NaN."""

    id: Any
    count: Any
    last_time: Any
    sum: Any
    minimum: Any
    maximum: Any
    last: Any  # bits


# -- encoding


def encode(samples: Samples, deleted: Tombstones = NO_TOMBSTONES) -> bytes:
    """Encode a block. Requires: the samples are sorted and distinct, the tombstones a `union`."""
    starts = _run_starts(samples.ids)
    counts = np.diff(np.append(starts, len(samples)))
    run_chunks = _side_by_side(counts)
    chunks: list[tuple[int, int, int, bytes]] = []  # type, encoding, count, bytes
    column_of, columns = _time_columns(samples.times, starts, counts)
    column_counts = counts[columns]
    column_chunks = _side_by_side(column_counts)
    for first, last in _chunk_borders(column_chunks):
        parts = [samples.times[starts[run] : starts[run] + counts[run]] for run in columns[first:last].tolist()]
        chunks.append(_encode_times(np.concatenate(parts)))
    time_chunks = len(chunks)
    values = samples.bits.view(np.float64)
    for first, last in _chunk_borders(run_chunks):
        some = values[starts[first] : starts[last - 1] + counts[last - 1]]
        chunks.append((FLOAT64, PCODEC, len(some), simple_compress(np.ascontiguousarray(some), _CONFIG)))
    runs = dict(
        id=samples.ids[starts], count=counts, time_column=column_of, chunk=run_chunks + time_chunks,
        **_statistics(samples, starts, counts),
    )  # fmt: skip
    directory = b"".join(
        [np.ascontiguousarray(runs[name], dtype).tobytes() for name, dtype in _RUN_COLUMNS]
        + [column.astype("<u4").tobytes() for column in (column_counts, column_chunks)]
        + [np.array([chunk[field] for chunk in chunks], "<u4").tobytes() for field in range(3)]
        + [np.array([len(chunk[3]) for chunk in chunks], "<u4").tobytes()]
        + [deleted.ids.astype("<u4").tobytes(), deleted.starts.astype("<i8").tobytes()]
        + [deleted.ends.astype("<i8").tobytes()]
    )
    packed: bytes = _zstd.compress(directory, asbytes=True)
    codec, stored = (_ZSTD, packed) if len(packed) < len(directory) else (_RAW, directory)
    header = _HEADER.pack(
        VERSION, codec, 0, len(starts), len(columns), len(chunks), len(deleted), len(directory), len(stored)
    )
    return b"".join([header, stored, *(chunk[3] for chunk in chunks)])


def _run_starts(ids: U32) -> I64:
    """Return where runs begin: at each series, and within a long one at equal distances below the largest chunk."""
    if not len(ids):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    counts = np.diff(np.append(starts, len(ids)))
    if counts.max() <= CHUNK_SAMPLES_MAX:
        return starts
    pieces = -(-counts // CHUNK_SAMPLES_MAX)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    within: I64 = number * np.repeat(counts, pieces) // np.repeat(pieces, pieces)
    return np.repeat(starts, pieces) + within


def _side_by_side(counts: I64) -> I64:
    """Return the chunk of each run: its own for a long run, for short ones as many as fit."""
    chunks = np.zeros(len(counts), np.int64)
    chunk, room = -1, 0
    for index, count in enumerate(counts.tolist()):
        if count >= CHUNK_SAMPLES_MIN:
            chunk, room = chunk + 1, 0
        elif count > room:
            chunk, room = chunk + 1, CHUNK_SAMPLES_MAX - count
        else:
            room -= count
        chunks[index] = chunk
    return chunks


def _chunk_borders(chunks: I64) -> list[tuple[int, int]]:
    """Return the first and the last run (exclusive) of each chunk."""
    if not len(chunks):
        return []
    borders = np.flatnonzero(np.diff(chunks)) + 1
    return list(zip([0, *borders.tolist()], [*borders.tolist(), len(chunks)], strict=True))


def _time_columns(times: I64, starts: I64, counts: I64) -> tuple[I64, I64]:
    """Return the column of times of each run, and for each column the first run that has it."""
    column_by_times: dict[bytes, int] = {}
    firsts: list[int] = []
    column_of = np.zeros(len(starts), np.int64)
    for run, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        column = column_by_times.setdefault(times[start : start + count].tobytes(), len(firsts))
        if column == len(firsts):
            firsts.append(run)
        column_of[run] = column
    return column_of, np.array(firsts, np.int64)


def _encode_times(times: I64) -> tuple[int, int, int, bytes]:
    steps = np.diff(times)
    if not len(steps) or (steps == steps[0]).all():  # pcodec would take 0.3 bytes for each
        step = int(steps[0]) if len(steps) else 0
        return TIMES, PROGRESSION, len(times), _PROGRESSION.pack(int(times[0]), step)
    return TIMES, PCODEC, len(times), simple_compress(times, _CONFIG)


def _statistics(samples: Samples, starts: I64, counts: I64) -> dict[str, Any]:
    if not len(starts):
        return {name: np.zeros(0) for name, _ in _RUN_COLUMNS[4:]}
    ends = starts + counts - 1
    values = samples.bits.view(np.float64)
    nan = np.isnan(values)
    if nan.any():
        nans = np.add.reduceat(nan, starts, dtype=np.int64)
        low, high, zero = (np.where(nan, fill, values) for fill in (np.inf, -np.inf, 0.0))
    else:
        nans = np.zeros(len(starts), np.int64)
        low = high = zero = values
    nothing = nans == counts
    with np.errstate(all="ignore"):  # inf - inf, and sums past the largest float
        totals = np.add.reduceat(zero, starts)
    return {
        "nans": nans,
        "first_time": samples.times[starts],
        "last_time": samples.times[ends],
        "sum": np.where(np.isnan(totals), np.nan, totals),  # one NaN for all: its bits must not depend on the machine
        "minimum": np.where(nothing, np.nan, np.minimum.reduceat(low, starts)),
        "maximum": np.where(nothing, np.nan, np.maximum.reduceat(high, starts)),
        "first": samples.bits[starts],
        "last": samples.bits[ends],
    }


# -- decoding


class _Layout(NamedTuple):
    """Where runs, or time columns, are: their starts among all items, and their chunks, which are of one type."""

    starts: I64
    chunks: Any
    kind: int


class DecodedChunks(Protocol):
    """A cache of the decoded chunks of one block. It does not hold the bytes of the block, but can load them."""

    def load(self) -> bytes:
        """Return the bytes of the block."""

    def get(self, chunk: int) -> U64 | None:
        """Return a chunk; None if it is not cached."""

    def put(self, chunk: int, items: U64) -> None:
        """Offer a chunk to the cache."""


class Block:
    """A block, of which only the directory is decoded."""

    __slots__ = ("_cache", "_chunk_at", "_chunks", "_column_starts", "_columns", "_data", "_starts", "deleted", "runs")

    def __init__(self, data: bytes, cache: DecodedChunks | None = None) -> None:
        try:
            version, codec, _, runs, columns, chunks, deleted, size, stored = _HEADER.unpack_from(data)
        except struct.error:
            _refuse("it is cut short")
        if version != VERSION:
            _refuse(f"its version is {version}: open it with a newer release")
        expected = _size(_RUN_COLUMNS, runs) + _size(_COLUMN_COLUMNS, columns)
        expected += _size(_CHUNK_COLUMNS, chunks) + _size(_TOMBSTONE_COLUMNS, deleted)
        if size != expected or size > DIRECTORY_BYTES_MAX or _HEADER.size + stored > len(data):
            _refuse("its directory has a wrong size")
        if codec not in (_RAW, _ZSTD) or (codec == _RAW and stored != size):
            _refuse("its directory has an unknown form")
        directory = data[_HEADER.size : _HEADER.size + stored]
        if codec == _ZSTD:
            try:
                directory = _zstd.decompress(directory, decompressed_size=size, asbytes=True)
            except (OSError, pa.ArrowException) as error:
                _refuse(f"its directory does not decompress ({error})")
            if len(directory) != size:
                _refuse("its directory has a wrong size")
        at = 0
        self.runs, at = _columns(directory, _RUN_COLUMNS, runs, at)
        self._columns, at = _columns(directory, _COLUMN_COLUMNS, columns, at)
        self._chunks, at = _columns(directory, _CHUNK_COLUMNS, chunks, at)
        tombstones, at = _columns(directory, _TOMBSTONE_COLUMNS, deleted, at)
        self.deleted = Tombstones(tombstones["id"], tombstones["start"], tombstones["end"])
        self._data = data if cache is None else None
        self._cache = cache
        self._chunk_at = _HEADER.size + stored + np.cumsum(self._chunks["bytes"], dtype=np.int64)
        self._starts = np.cumsum(self.runs["count"], dtype=np.int64) - self.runs["count"]
        self._column_starts = np.cumsum(self._columns["count"], dtype=np.int64) - self._columns["count"]
        if len(data) != (self._chunk_at[-1] if chunks else _HEADER.size + stored):
            _refuse("its chunks have a wrong size")
        for counts in (self.runs["count"], self._chunks["count"]):
            if counts.max(initial=0) > COUNT_MAX:  # before memory is taken for them
                _refuse("its directory counts more samples than a chunk has")

    def __len__(self) -> int:
        return int(self.runs["count"].sum(dtype=np.int64))

    def select(self, ids: U32 | None, start: int, end: int) -> Flags:
        """Return which runs may hold samples of these series (sorted; None: all) with times in [start, end)."""
        runs = self.runs
        which: Flags = (runs["last_time"] >= start) & (runs["first_time"] < end)
        if ids is not None:
            if not len(ids):
                return np.zeros(len(which), np.bool_)
            at = np.minimum(np.searchsorted(ids, runs["id"]), len(ids) - 1)
            which &= ids[at] == runs["id"]
        return which

    def in_one_step(self, which: Flags, start: int, end: int, step_us: int) -> Flags:
        """Return which of these runs lie within [start, end) and one step of time (0: any), and hold no NaN."""
        first, last = self.runs["first_time"], self.runs["last_time"]
        inside: Flags = which & (first >= start) & (last < end) & (self.runs["nans"] == 0)
        return inside & (first // step_us == last // step_us) if step_us else inside

    def summaries(self, which: Flags) -> RunSummaries:
        """Return what the directory says of some runs."""
        return RunSummaries(*(self.runs[name][which] for name in RunSummaries._fields))

    def read(self, which: Flags | None = None) -> Samples:
        """Return the samples of some runs, or of all."""
        runs = self.runs
        if which is None:
            which = np.ones(len(runs["id"]), np.bool_)
        picked = np.flatnonzero(which)
        if not len(picked):
            return NO_SAMPLES
        counts = runs["count"][picked].astype(np.int64)
        columns = self._time_columns_of(picked)
        data: list[bytes] = []
        values, times = (
            _Layout(self._starts, runs["chunk"], FLOAT64),
            _Layout(self._column_starts, self._columns["chunk"], TIMES),
        )
        ids = np.repeat(runs["id"][picked], counts)
        if len(picked) == 1:  # a select of one series
            count = int(counts[0])
            moments = self._items(times, int(columns[0]), count, data)
            return Samples(ids, moments.view(np.int64), self._items(values, int(picked[0]), count, data))
        offsets = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        bits = self._gather(values, picked, counts, offsets, data)
        return Samples(ids, self._gather(times, columns, counts, offsets, data).view(np.int64), bits)

    def _items(self, layout: _Layout, number: int, count: int, data: list[bytes]) -> U64:
        """Decode the chunk of one run or time column and return its items, as 64-bit words."""
        chunk = int(layout.chunks[number])
        decoded = self._decoded(chunk, layout.kind, data)
        at = 0
        if number and layout.chunks[number - 1] == chunk:
            at = int(layout.starts[number] - layout.starts[np.searchsorted(layout.chunks, chunk)])
        if not 0 <= at <= at + count <= len(decoded):
            _refuse("a run reaches past its chunk")
        return decoded[at : at + count]

    def between(self, which: Flags, start: int, end: int, steps: SampleSteps | None = None) -> Samples:
        """Return the samples of some runs with times in [start, end); with `steps`, only the last before each."""
        picked = np.flatnonzero(which)
        if not len(picked):
            return NO_SAMPLES
        runs = self.runs
        inside = runs["first_time"][picked].min() >= start and runs["last_time"][picked].max() < end
        if (steps is not None or not inside) and runs["count"][picked].min() >= CHUNK_SAMPLES_MIN:
            return self._cut(picked, start, end, steps)
        samples = self.read(which)
        if not inside:
            samples = samples.take((samples.times >= start) & (samples.times < end))
        return samples if steps is None else steps.thinned(samples)

    def _cut(self, picked: Any, start: int, end: int, steps: SampleSteps | None) -> Samples:
        """Return the samples in [start, end) of runs that have chunks of their own: no others are copied."""
        runs = self.runs
        columns = self._time_columns_of(picked)
        values = _Layout(self._starts, runs["chunk"], FLOAT64)
        times = _Layout(self._column_starts, self._columns["chunk"], TIMES)
        cuts: dict[int, tuple[Any, I64]] = {}  # by column of times: the selection, and the times in it
        data: list[bytes] = []
        moments: list[I64] = []
        bits: list[U64] = []
        for run, column, count in zip(picked.tolist(), columns.tolist(), runs["count"][picked].tolist(), strict=True):
            if column not in cuts:
                whole = self._items(times, column, count, data).view(np.int64)
                low, high = int(whole.searchsorted(start)), int(whole.searchsorted(end))
                selection = slice(low, high) if steps is None else steps.last_between(whole, low, high)
                cuts[column] = selection, whole[selection]
            selection, some = cuts[column]
            moments.append(some)
            bits.append(self._items(values, run, count, data)[selection])
        if len(picked) == 1:
            return Samples(np.full(len(bits[0]), runs["id"][picked[0]]), moments[0], bits[0])
        ids = np.repeat(runs["id"][picked], [len(some) for some in moments])
        return Samples(ids, np.concatenate(moments), np.concatenate(bits))

    def _time_columns_of(self, picked: Any) -> Any:
        columns = self.runs["time_column"][picked]
        if columns.max() >= len(self._columns["chunk"]):
            _refuse("a run names a column that does not exist")
        return columns

    def _gather(self, layout: _Layout, picked: Any, counts: I64, offsets: I64, data: list[bytes]) -> U64:
        """Decode the chunks of some runs or time columns and return their items, as 64-bit words."""
        chunks = layout.chunks[picked]
        used = np.unique(chunks)
        decoded = [self._decoded(chunk, layout.kind, data) for chunk in used.tolist()]
        sizes = np.array([len(part) for part in decoded], np.int64)
        # Where each used chunk begins among the decoded ones, less where it begins among all.
        firsts = layout.starts[np.minimum(np.searchsorted(layout.chunks, used), len(layout.starts) - 1)]
        shift = np.cumsum(sizes) - sizes - firsts
        at: I64 = layout.starts[picked] + shift[np.searchsorted(used, chunks)]
        joined = decoded[0] if len(decoded) == 1 else np.concatenate(decoded)
        if int((at + counts).max()) > len(joined) or int(at.min()) < 0:
            _refuse("a run reaches past its chunk")
        if len(joined) == len(offsets) and (np.diff(at) == counts[:-1]).all() and at[0] == 0:
            return joined
        items: U64 = joined[np.repeat(at, counts) + offsets]
        return items

    def _decoded(self, chunk: int, kind: int, data: list[bytes]) -> U64:
        """Return a chunk, decoded now or before; `data` is where one read holds the bytes of the block."""
        cache = self._cache
        if cache is None:
            assert self._data is not None
            return self._decode(self._data, chunk, kind)
        items = cache.get(chunk)
        if items is None or chunk >= len(self._chunks["type"]) or self._chunks["type"][chunk] != kind:
            if not data:
                data.append(cache.load())
            items = self._decode(data[0], chunk, kind)
            items.flags.writeable = False  # others read it, too
            cache.put(chunk, items)
        return items

    def _decode(self, block: bytes, chunk: int, kind: int) -> U64:
        chunks = self._chunks
        if chunk >= len(chunks["count"]) or chunks["type"][chunk] != kind:
            _refuse("a run names a chunk that does not exist, or one of another type")
        count, size = int(chunks["count"][chunk]), int(chunks["bytes"][chunk])
        end = int(self._chunk_at[chunk])
        data = block[end - size : end]
        if chunks["encoding"][chunk] == PROGRESSION:
            if size != _PROGRESSION.size:
                _refuse("a progression of times has a wrong size")
            first, step = _PROGRESSION.unpack(data)
            times: I64 = np.arange(count, dtype=np.int64) * step + first
            return times.view(np.uint64)
        target = np.empty(count, np.int64 if kind == TIMES else np.float64)
        try:
            progress = simple_decompress_into(data, target)
        except (RuntimeError, TypeError) as error:
            _refuse(f"a chunk does not decompress ({error})")
        if progress.n_processed != count or not progress.finished:
            _refuse("a chunk has another number of samples than its directory says")
        return target.view(np.uint64)


def _size(columns: tuple[tuple[str, str], ...], count: int) -> int:
    return count * sum(np.dtype(dtype).itemsize for _, dtype in columns)


def _columns(data: bytes, columns: tuple[tuple[str, str], ...], count: int, at: int) -> tuple[dict[str, Any], int]:
    parsed: dict[str, Any] = {}
    for name, dtype in columns:
        parsed[name] = np.frombuffer(data, dtype, count, at)
        at += parsed[name].nbytes
    return parsed, at


def _refuse(reason: str) -> NoReturn:
    raise CorruptionError("a block of samples", 0, reason)
