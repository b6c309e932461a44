"""Label sets: their rules, their canonical bytes, their fingerprint, and tables of many label sets as columns.

A series is a set of labels, name to value. Its metric is the label `__name__`. An empty value means that the label is
absent. The canonical form is a tuple of (name, value) sorted by name.

The fingerprint is two 64-bit lanes, each the sum modulo 2**64 of the lanes of xxh3_128(name, 0, value) over the labels:
a table of label sets gets its fingerprints from one hash for each distinct (name, value). Two label sets may have one
fingerprint; only the labels themselves say whether two series are the same.

Thread: immutable values; any.
Invariant: the labels of a `LabelTable` satisfy the rules, its names are sorted, and its rows are distinct.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arguments import in_short
from penstock.errors import CorruptionError, Invalid
from penstock.series import bounded_zstd

METRIC = "__name__"
LABELS_MAX = 64  # of one series, the metric included
NAME_BYTES_MAX = 255
VALUE_BYTES_MAX = 4_096

Labels: TypeAlias = tuple[tuple[str, str], ...]  # sorted by name, without empty values
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
_PAIR = struct.Struct("<BH")  # lengths of a name and its value
_LANES = np.dtype(">u8")

digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest  # tests replace it, so that everything collides


# -- one label set


def check_labels(metric: Any, labels: Any) -> Labels:
    """Return the canonical labels of a series; `Invalid` if a name or a value breaks a rule."""
    pairs = [(METRIC, metric)]
    if labels is not None:
        if not isinstance(labels, Mapping):
            raise Invalid(f"labels are a mapping of names to values, not {in_short(labels)}")
        pairs += labels.items()
    checked = [(check_name(name), check_value(name, value)) for name, value in pairs]
    if not checked[0][1]:
        raise Invalid("a metric has a name: give a text that is not empty")
    canonical = sorted(pair for pair in checked if pair[1])
    if len({name for name, _ in canonical}) != len(canonical):
        raise Invalid(f"the labels of {in_short(metric)} name {METRIC}: give the metric apart from the labels")
    if len(canonical) > LABELS_MAX:
        raise Invalid(f"a series of {in_short(metric)} has {len(canonical)} labels: at most {LABELS_MAX} are allowed")
    return tuple(canonical)


def check_name(name: Any) -> str:
    """Return a label's name as plain text; `Invalid` if it is not one."""
    if isinstance(name, str):
        plain = str.__str__(name)
        if plain and "\0" not in plain and _bytes(plain) <= NAME_BYTES_MAX:
            return plain
    raise Invalid(f"a label's name is a text of 1 to {NAME_BYTES_MAX} bytes without NUL, not {in_short(name)}")


def check_value(name: Any, value: Any) -> str:
    """Return a label's value as plain text; `Invalid` if it is not one."""
    if isinstance(value, str):
        plain = str.__str__(value)
        if _bytes(plain) <= VALUE_BYTES_MAX:
            return plain
    subject = "a metric" if name == METRIC else f"the label {in_short(name)}"
    raise Invalid(f"{subject} is a text of at most {VALUE_BYTES_MAX} bytes, not {in_short(value)}")


def _bytes(text: str) -> int:
    """Return the length of a text in UTF-8; more than any limit if it cannot be encoded."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return 1 << 62


def encode_labels(labels: Iterable[tuple[str, str]]) -> bytes:
    """Return the canonical bytes of a label set. Requires: sorted by name, without empty values."""
    parts: list[bytes] = []
    for name, value in labels:
        key, data = name.encode(), value.encode()
        parts += (_PAIR.pack(len(key), len(data)), key, data)
    return b"".join(parts)


def decode_labels(data: bytes) -> Labels:
    """Decode the canonical bytes of a label set; `CorruptionError` for other bytes."""
    pairs: list[tuple[str, str]] = []
    at = 0
    try:
        while at < len(data):
            name_size, value_size = _PAIR.unpack_from(data, at)
            middle = at + _PAIR.size + name_size
            pairs.append((data[at + _PAIR.size : middle].decode(), data[middle : middle + value_size].decode()))
            at = middle + value_size
    except (struct.error, UnicodeDecodeError) as error:
        _refuse_bytes(str(error))
    if at != len(data):
        _refuse_bytes("they are cut short")
    return tuple(pairs)


def _refuse_bytes(reason: str) -> NoReturn:
    raise CorruptionError("labels of a series", 0, f"they do not decode ({reason})")


def fingerprint_of(labels: Iterable[tuple[str, str]]) -> tuple[int, int]:
    """Return the two lanes of a label set's fingerprint."""
    lanes = pair_hashes((f"{name}\0{value}".encode() for name, value in labels)).sum(axis=0, dtype=np.uint64)
    return int(lanes[0]), int(lanes[1])


def pair_hashes(pairs: Iterable[bytes]) -> U64:
    """Return the lanes of each (name, 0, value): an array of pairs x 2."""
    return np.frombuffer(b"".join(map(digest, pairs)), _LANES).astype(np.uint64).reshape(-1, 2)


# -- many label sets


class LabelTable:
    """Distinct label sets as columns: for each series and name a code, which is 0 or 1 + the index of the value."""

    __slots__ = ("__weakref__", "_encoded", "_fingerprints", "_shards", "_sizes", "codes", "names", "values")

    def __init__(self, names: Sequence[str], values: Sequence[Sequence[str]], codes: U32) -> None:
        self.names = tuple(names)
        self.values = tuple(values)  # for each name, the distinct values
        self.codes = codes  # series x names
        self._fingerprints: U64 | None = None
        self._encoded: bytes | None = None
        self._sizes: npt.NDArray[np.int64] | None = None
        self._shards: tuple[int, list[tuple[LabelTable, npt.NDArray[np.intp]]]] | None = None

    @classmethod
    def of(cls, label_sets: Sequence[Labels]) -> LabelTable:
        """Return the table of distinct canonical label sets."""
        shapes: dict[tuple[str, ...], tuple[list[int], list[tuple[str, ...]]]] = {}  # by names: rows, and their values
        for row, labels in enumerate(label_sets):
            names, values = zip(*labels, strict=True) if labels else ((), ())
            rows_and_values = shapes.get(names)
            if rows_and_values is None:
                rows_and_values = shapes[names] = [], []
            rows_and_values[0].append(row)
            rows_and_values[1].append(values)
        every = sorted({name for names in shapes for name in names})
        column = {name: index for index, name in enumerate(every)}
        value_numbers: list[dict[str, int]] = [{} for _ in every]
        codes = np.zeros((len(label_sets), len(every)), np.uint32)
        for names, (rows, sets) in shapes.items():
            for name, texts in zip(names, zip(*sets, strict=True), strict=True):
                numbers = value_numbers[column[name]]
                for text in dict.fromkeys(texts):
                    numbers.setdefault(text, len(numbers) + 1)
                codes[rows, column[name]] = list(map(numbers.__getitem__, texts))
        return cls(every, [list(values) for values in value_numbers], codes)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def fingerprints(self) -> U64:
        """The fingerprint of each series: an array of series x 2."""
        if self._fingerprints is None:
            lanes = np.zeros((len(self), 2), np.uint64)
            for index, (name, values) in enumerate(zip(self.names, self.values, strict=True)):
                prefix = name.encode() + b"\0"
                hashes = np.zeros((len(values) + 1, 2), np.uint64)
                hashes[1:] = pair_hashes(prefix + value.encode() for value in values)
                lanes += hashes[self.codes[:, index]]
            self._fingerprints = lanes
        return self._fingerprints

    def labels(self, row: int) -> Labels:
        """Return the canonical labels of a series."""
        codes: list[int] = self.codes[row].tolist()
        pairs = zip(self.names, self.values, codes, strict=True)
        return tuple((name, values[code - 1]) for name, values, code in pairs if code)

    def label_bytes(self, rows: Iterable[int] | None = None) -> list[bytes]:
        """Return the canonical bytes of some series, or of all."""
        pairs: list[list[bytes]] = []  # for each name: nothing, then the bytes of each (name, value)
        for name, values in zip(self.names, self.values, strict=True):
            pairs.append([b"", *(encode_labels([(name, value)]) for value in values)])
        codes = self.codes if rows is None else self.codes[list(rows)]
        columns = [list(map(some.__getitem__, codes[:, index].tolist())) for index, some in enumerate(pairs)]
        return list(map(b"".join, zip(*columns, strict=True))) if columns else [b""] * len(codes)

    def label_sizes(self) -> npt.NDArray[np.int64]:
        """Return the length of the canonical bytes of each series."""
        if self._sizes is None:
            sizes = np.zeros(len(self), np.int64)
            for index, (name, values) in enumerate(zip(self.names, self.values, strict=True)):
                each = _PAIR.size + len(name.encode())
                sizes += np.array([0, *(each + len(value.encode()) for value in values)])[self.codes[:, index]]
            self._sizes = sizes
        return self._sizes

    def by_shard(self, shards: int) -> list[tuple[LabelTable, npt.NDArray[np.intp]]]:
        """Return, for each shard, the table of its series and their rows here."""
        if self._shards is None or self._shards[0] != shards:
            numbers = shard_numbers(self.fingerprints, shards)
            parts: list[tuple[LabelTable, npt.NDArray[np.intp]]] = []
            for shard in range(shards):
                rows = np.flatnonzero(numbers == shard)
                parts.append((self.take(rows), rows))
            self._shards = shards, parts
        return self._shards[1]

    def take(self, rows: npt.NDArray[np.intp]) -> LabelTable:
        """Return the table of some series, without the values and names that none of them has."""
        names: list[str] = []
        value_lists: list[list[str]] = []
        columns: list[U32] = []
        for index, (name, values) in enumerate(zip(self.names, self.values, strict=True)):
            used, column = np.unique(self.codes[rows, index], return_inverse=True)
            if len(used) and used[-1]:
                names.append(name)
                value_lists.append([values[code - 1] for code in used.tolist() if code])
                columns.append((column.reshape(-1) + (used[0] > 0)).astype(np.uint32))
        codes = np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0), np.uint32)
        return LabelTable(names, value_lists, codes)

    # -- bytes

    def encode(self) -> bytes:
        """Return the table as bytes; they are made once."""
        if self._encoded is None:
            self._encoded = _encode_table(self)
        return self._encoded


def shard_numbers(fingerprints: U64, shards: int) -> npt.NDArray[np.uint64]:
    """Return the shard of each fingerprint."""
    return fingerprints[:, 0] % np.uint64(shards)


def shard_number_of(fingerprint: tuple[int, int], shards: int) -> int:
    """Return the shard of one fingerprint."""
    return fingerprint[0] % shards


# A table as bytes: its size before compression u32, or 0 if it is not compressed; then, compressed by zstd or not,
#   series u32, names u32
#   for each name:  length of the name u16, bytes of a code u16 (1, 2 or 4), distinct values u32, bytes of values u32
#                   name | length of each value u16 | values | code of each series
# Most tables are written many times, so their bytes are kept: they are compressed once, and the journal is shorter.
_SIZE = struct.Struct("<I")
_TABLE = struct.Struct("<II")
_COLUMN = struct.Struct("<HHII")
_CODES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


COMPRESS_BYTES = 1_024
TABLE_BYTES_MAX = 1 << 28


def _encode_table(table: LabelTable) -> bytes:
    raw = _table_bytes(table)
    if len(raw) < COMPRESS_BYTES or len(raw) > TABLE_BYTES_MAX:
        return _SIZE.pack(0) + raw
    stored = bounded_zstd.compress(raw)
    return _SIZE.pack(0) + raw if stored is None else _SIZE.pack(len(raw)) + stored


def _table_bytes(table: LabelTable) -> bytes:
    parts = [_TABLE.pack(len(table), len(table.names))]
    for index, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
        key, data = name.encode(), [value.encode() for value in values]
        lengths = np.fromiter(map(len, data), "<u2", len(data)).tobytes()
        joined = b"".join(data)
        width = 1 if len(data) < 1 << 8 else 2 if len(data) < 1 << 16 else 4
        codes = table.codes[:, index].astype(_CODES[width]).tobytes()
        parts += (_COLUMN.pack(len(key), width, len(data), len(joined)), key, lengths, joined, codes)
    return b"".join(parts)


def table_size(stored: bytes, at: int = 0) -> int:
    """Return the bytes that a stored table states to have before compression, at most TABLE_BYTES_MAX."""
    return min(int(_SIZE.unpack_from(stored, at)[0]), TABLE_BYTES_MAX) if at + _SIZE.size <= len(stored) else 0


def _raw_table(stored: bytes) -> bytes:
    (size,) = _SIZE.unpack_from(stored)
    rest = stored[_SIZE.size :]
    return bounded_zstd.decompress(rest, size, TABLE_BYTES_MAX) if size else rest


def decode_table(stored: bytes) -> LabelTable:
    """Decode a table; `CorruptionError` if it is malformed. It may still break the rules: see `check_table`."""
    try:
        payload = _raw_table(stored)
        series, count = _TABLE.unpack_from(payload)
        at = _TABLE.size
        names: list[str] = []
        values: list[list[str]] = []
        if count > (len(payload) - at) // _COLUMN.size or (series and not count):
            raise ValueError("it is cut short")
        columns: list[U32] = []
        for _ in range(count):
            name_size, width, distinct, size = _COLUMN.unpack_from(payload, at)
            at += _COLUMN.size
            names.append(payload[at : at + name_size].decode())
            at += name_size
            ends = np.cumsum(np.frombuffer(payload, "<u2", distinct, at), dtype=np.int64).tolist()
            at += 2 * distinct
            values.append(_split(payload[at : at + size], ends, size))
            at += size
            columns.append(np.frombuffer(payload, _CODES[width], series, at).astype(np.uint32))
            at += width * series
        if at != len(payload):
            raise ValueError("its length is wrong")
    except (ValueError, KeyError, struct.error) as error:
        raise CorruptionError("labels of a series section", 0, f"they do not decode ({error})") from None
    codes = np.stack(columns, axis=1) if columns else np.zeros((0, 0), np.uint32)
    table = LabelTable(names, values, codes)
    table._encoded = stored
    return table


def _split(data: bytes, ends: list[int], size: int) -> list[str]:
    if (ends[-1] if ends else 0) != size or len(data) != size:
        raise ValueError("the values of a label are cut short")
    if data.isascii():
        text = data.decode("ascii")
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [data[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def check_table(table: LabelTable) -> None:
    """Raise `Invalid` if a table from another process breaks a rule."""
    names, codes = table.names, table.codes
    if list(names) != sorted(set(names)) or (len(table) and METRIC not in names):
        raise Invalid(f"the names of labels are sorted and distinct, and {METRIC} is one of them")
    for index, (name, values) in enumerate(zip(names, table.values, strict=True)):
        check_name(name)
        if len(set(values)) != len(values) or not all(values):
            raise Invalid(f"the values of the label {in_short(name)} are not distinct, or one is empty")
        for value in values:
            check_value(name, value)
        if codes[:, index].max(initial=0) > len(values):
            raise Invalid(f"the label {in_short(name)} has fewer values than its codes name")
    if not len(table):
        return
    if not codes[:, names.index(METRIC)].all():
        raise Invalid("a metric has a name: give a text that is not empty")
    if np.count_nonzero(codes, axis=1).max() > LABELS_MAX:
        raise Invalid(f"a series has more than {LABELS_MAX} labels")
    if not _are_distinct(codes, [len(values) + 1 for values in table.values]):
        raise Invalid("a series stands twice in one section")


def _are_distinct(codes: U32, sizes: Sequence[int]) -> bool:
    """Return whether no two rows of codes are the same; `sizes` says how many codes each column has at most."""
    keys, size = np.zeros(len(codes), np.uint64), 1
    for column, more in enumerate(sizes):
        if size * more >= 1 << 63:
            keys = np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.uint64)
            size = len(codes)
        keys = keys * np.uint64(more) + codes[:, column]
        size *= more
    return len(np.unique(keys)) == len(codes)
