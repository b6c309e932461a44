"""Prometheus remote write: the body of a request becomes columns. Version 1.0 repeats labels, 2.0 has a table of texts.

The fields that matter are read in place; others are skipped. Senders repeat the labels of a series with every sample,
in the same bytes, so those are decoded once and remembered (`LabelCache`): of a request of known series only the
borders are read one by one. The samples of all series, which nearly always have one layout, are decoded together.
Native histograms are counted and left out.

Thread: pure functions, but for the cache, which any thread may use.
"""

from __future__ import annotations

import struct
from array import array

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import Invalid
from penstock.http import samples as samples_module
from penstock.http.samples import KnownLabels, KnownSeries, LabelCache, ReceivedSamples, SampleCollector
from penstock.http.wire_format import (
    BLOCK,
    FIXED64,
    VARINT,
    FieldBudget,
    MalformedMessage,
    read_fields,
    read_varint,
    signed,
)
from penstock.series.labels import LABELS_MAX, METRIC, Labels, check_labels
from penstock.series.options import TIME_MAX, TIME_MIN

BODY_BYTES_MAX = 32 << 20  # of a decompressed body
SYMBOLS_MAX = 1 << 20
CONTENT_TYPE = "application/x-protobuf"
VERSIONS = {"prometheus.WriteRequest": 1, "io.prometheus.write.v2.Request": 2}
METRIC_TYPES = ("unknown", "counter", "gauge", "histogram", "histogram", "summary", "info", "stateset")
# A sample as all senders write it: the field, 16 bytes, the value, and milliseconds (since 2004) in six bytes.
SAMPLE_BYTES = 18
_SAMPLE_HEAD = b"\x12\x10\x09"
_FIXED_OFFSETS, _FIXED_BYTES = [0, 1, 2, 11], np.array([0x12, 0x10, 0x09, 0x10], np.uint8)
_CONTINUED = np.array([1, 1, 1, 1, 1, 0], np.uint8)  # the highest bits of a varint of six bytes
_DOUBLE = struct.Struct("<d")
_FIELD_1, _FIELD_2, _FIELD_3, _FIELD_4, _FIELD_5 = (number << 3 | BLOCK for number in range(1, 6))
_SERIES_1, _METADATA_1, _SERIES_2 = _FIELD_1, _FIELD_3, _FIELD_5
_NUMBER_1, _VALUE, _TIME = 1 << 3 | VARINT, 1 << 3 | FIXED64, 2 << 3 | VARINT


def write_version(content_type: str) -> int:
    """Return the version that a content type announces, 1 or 2; `Invalid` for others (answer 415)."""
    kind, *parameters = (part.strip() for part in content_type.split(";"))
    if kind.lower() != CONTENT_TYPE:
        raise Invalid(f"remote write takes {CONTENT_TYPE}, not {kind[:80]!r}")
    named = [part[6:].strip('"') for part in parameters if part.lower().startswith("proto=")]
    version = VERSIONS.get(named[0] if named else "prometheus.WriteRequest")
    if version is None:
        raise Invalid(f"remote write knows {' and '.join(VERSIONS)}, not {named[0][:80]!r}")
    return version


def decode_write(body: bytes, version: int, cache: LabelCache | None = None) -> ReceivedSamples:
    """Decompress and decode a request of version 1 or 2; `Invalid` if it is malformed or too large."""
    data = decompressed(body)
    known_labels = (cache or LabelCache()).current()
    try:
        if version == 1 and (samples := _repeated_series(data, known_labels)) is not None:
            return samples
        request = _WriteRequest(data, known_labels)
        return request.version_1() if version == 1 else request.version_2()
    except (MalformedMessage, UnicodeDecodeError) as error:
        raise Invalid(f"the body is not a request of remote write {version}.0: {error}") from None


def decompressed(body: bytes) -> bytes:
    """Decompress snappy's block format; the length that it declares is checked first."""
    size = shift = used = 0
    for byte in body[:5]:
        size |= (byte & 127) << shift
        shift, used = shift + 7, used + 1
        if byte < 128:
            break
    else:
        raise Invalid("the body is not compressed by snappy: its length is malformed")
    if size > BODY_BYTES_MAX:
        raise Invalid(f"the body has {size} bytes when decompressed: at most {BODY_BYTES_MAX} are allowed")
    if not size:
        if len(body) != used:
            raise Invalid("the body is not compressed by snappy: it has more bytes than it declares")
        return b""
    try:
        data: bytes = pa.Codec("snappy").decompress(body, size, asbytes=True)
    except (OSError, pa.ArrowException):
        raise Invalid("the body is not compressed by snappy in its block format") from None
    return data


def _repeated_series(data: bytes, known_labels: KnownLabels) -> ReceivedSamples | None:
    """Decode a request of version 1 in which every series is known and has one sample; None for any other."""
    get, at, size = known_labels.get, 0, len(data)
    series: list[KnownSeries] = []
    ends: list[int] = []
    try:
        while at < size:
            start, length = at + 2, data[at + 1]
            if length > 127:
                start, length = at + 3, length & 127 | data[at + 2] << 7
            end = start + length
            entry = get(data[start : end - SAMPLE_BYTES])
            if entry is None or data[at] != _SERIES_1 or not SAMPLE_BYTES < length < 1 << 14:
                return None
            series.append(entry)
            ends.append(end)
            at = end
    except IndexError:
        return None
    if at != size or not 0 < len(series) <= samples_module.SERIES_MAX:
        return None
    offsets = np.array(ends)[:, None] + np.arange(-SAMPLE_BYTES, 0)
    columns = _plain_samples(np.frombuffer(data, np.uint8)[offsets])
    if columns is None:
        return None
    numbers = {entry: number for number, entry in enumerate(dict.fromkeys(series))}
    index = np.fromiter(map(numbers.__getitem__, series), np.int64, len(series))
    table = known_labels.table(tuple(numbers))
    return ReceivedSamples([entry.labels for entry in numbers], index, columns[0] * 1_000, columns[1], table=table)


class _WriteRequest:
    """One request while it is decoded."""

    def __init__(self, data: bytes, cache: KnownLabels) -> None:
        self._data = data
        self._cache = cache
        self._budget = FieldBudget()
        self._collector = SampleCollector()
        self._numbers: list[int] = []  # of each entry, its series
        self._fields: list[bytes] = []  # its samples, as they were sent
        self._counts: list[int] = []  # and how many they are
        self._total = 0

    def _add(self, labels: Labels, samples: bytes, count: int) -> None:
        if len(self._numbers) == samples_module.SERIES_MAX:
            raise Invalid(f"a request has at most {samples_module.SERIES_MAX} series: send fewer at once")
        self._total += count
        self._collector.check_room(self._total)
        self._numbers.append(self._collector.number_of(labels))
        self._fields.append(samples)
        self._counts.append(count)

    def _spans(self, spans: list[tuple[int, int]]) -> bytes:
        return b"".join([self._data[begin:end] for begin, end in spans])

    def _text(self, start: int, end: int) -> str:
        return self._data[start:end].decode()

    def result(self) -> ReceivedSamples:
        """Return what was decoded."""
        times_ms, values = _decoded_samples(self._fields, self._budget)
        low, high = -(-TIME_MIN // 1_000), TIME_MAX // 1_000
        if len(times_ms) and not low <= times_ms.min() <= times_ms.max() < high:
            raise Invalid("a sample's time is outside the years 1 to 9999: it is in milliseconds since 1970")
        index = np.repeat(np.array(self._numbers, np.int64), np.array(self._counts, np.int64))
        return self._collector.with_samples(index, times_ms * 1_000, values)

    # -- version 1: series (1) of labels (1), samples (2) and histograms (4); metadata (3)

    def version_1(self) -> ReceivedSamples:
        data, get = self._data, self._cache.get
        for tag, _, start, end in read_fields(data, 0, len(data), self._budget):
            if tag == _SERIES_1:
                split = end - SAMPLE_BYTES
                if data[split : split + 3] == _SAMPLE_HEAD and (known_series := get(data[start:split])) is not None:
                    # Known labels end at a field, so what is left is one sample.
                    self._add(known_series.labels, data[split:end], 1)
                else:
                    self._series_1(start, end)
            elif tag == _METADATA_1:
                self._metadata_1(start, end)
        return self.result()

    def _series_1(self, at: int, end: int) -> None:
        pairs: list[tuple[str, str]] = []
        spans: list[tuple[int, int]] = []
        labels_end = at  # of those that stand first, as they do in what senders send
        for tag, begin, start, stop in read_fields(self._data, at, end, self._budget):
            if tag == _FIELD_1:
                if len(pairs) == LABELS_MAX:
                    raise Invalid(f"a series has more than {LABELS_MAX} labels: at most {LABELS_MAX} are allowed")
                pairs.append(self._label(start, stop))
                labels_end = stop if labels_end == begin else -1
            elif tag == _FIELD_2:
                spans.append((begin, stop))
                self._collector.check_room(self._total + len(spans))
            elif tag == _FIELD_4:
                self._collector.left_out += 1
        labels = _checked(pairs)
        if labels_end > 0:
            self._cache.put(self._data[at:labels_end], labels, labels_end - at)
        self._add(labels, self._spans(spans), len(spans))

    def _label(self, at: int, end: int) -> tuple[str, str]:
        name = value = ""
        for tag, _, start, stop in read_fields(self._data, at, end, self._budget):
            if tag == _FIELD_1:
                name = self._text(start, stop)
            elif tag == _FIELD_2:
                value = self._text(start, stop)
        return name, value

    def _metadata_1(self, at: int, end: int) -> None:
        texts = {2: "", 4: "", 5: ""}
        number = 0
        for tag, _, start, stop in read_fields(self._data, at, end, self._budget):
            if tag == _NUMBER_1:
                number = start
            elif tag & 7 == BLOCK and tag >> 3 in texts:
                texts[tag >> 3] = self._text(start, stop)
        self._collector.describe(texts[2], type=_type(number), help=texts[4], unit=texts[5])

    # -- version 2: symbols (4); series (5) of references (1), samples (2), histograms (3) and metadata (5)

    def version_2(self) -> ReceivedSamples:
        symbols: list[str] = []
        series: list[tuple[int, int]] = []
        for tag, _, start, end in read_fields(self._data, 0, len(self._data), self._budget):
            if tag == _FIELD_4:
                symbols.append(self._text(start, end))
                if len(symbols) > SYMBOLS_MAX:
                    raise Invalid(f"a request has at most {SYMBOLS_MAX} symbols: send fewer series at once")
            elif tag == _SERIES_2:
                series.append((start, end))
                if len(series) > samples_module.SERIES_MAX:
                    raise Invalid(f"a request has at most {samples_module.SERIES_MAX} series: send fewer at once")
        if symbols[:1] not in ([], [""]):
            raise Invalid("the first symbol of remote write 2.0 is the empty text")
        for at, end in series:
            self._series_2(symbols, at, end)
        return self.result()

    def _series_2(self, symbols: list[str], at: int, end: int) -> None:
        refs: list[int] = []
        spans: list[tuple[int, int]] = []
        about: tuple[int, int] | None = None
        for tag, begin, start, stop in read_fields(self._data, at, end, self._budget):
            if tag == _FIELD_1:
                refs += self._packed(start, stop)
            elif tag == _FIELD_2:
                spans.append((begin, stop))
                self._collector.check_room(self._total + len(spans))
            elif tag == _FIELD_3:
                self._collector.left_out += 1
            elif tag == _FIELD_5:
                about = start, stop
            elif tag == _NUMBER_1:
                refs.append(start)
            if len(refs) > 2 * LABELS_MAX:
                break
        if len(refs) % 2 or len(refs) > 2 * LABELS_MAX:
            raise Invalid(f"labels_refs are pairs, at most {LABELS_MAX} of them, not {len(refs)} numbers")
        texts = tuple([_symbol(symbols, ref) for ref in refs])
        known_series = self._cache.get(texts)
        if known_series is not None:
            labels = known_series.labels
        else:
            labels = _checked(list(zip(texts[::2], texts[1::2], strict=True)))
            self._cache.put(texts, labels, sum(map(len, texts)))
        self._add(labels, self._spans(spans), len(spans))
        if about is not None:
            self._metadata_2(symbols, labels, *about)

    def _packed(self, at: int, end: int) -> list[int]:
        """Return packed numbers, and not many more than a series may have."""
        numbers: list[int] = []
        while at < end and len(numbers) <= 2 * LABELS_MAX:
            number = self._data[at]
            if number < 128:
                at += 1
            else:
                number, at = read_varint(self._data, at, end)
            numbers.append(number)
        return numbers

    def _metadata_2(self, symbols: list[str], labels: Labels, at: int, end: int) -> None:
        numbers = {1: 0, 3: 0, 4: 0}  # type, and references to help and unit
        for tag, _, start, _ in read_fields(self._data, at, end, self._budget):
            if tag & 7 == VARINT and tag >> 3 in numbers:
                numbers[tag >> 3] = start
        if any(numbers.values()):
            kind = _type(numbers[1])
            text, unit = (_symbol(symbols, numbers[field]) for field in (3, 4))
            self._collector.describe(_family(dict(labels)[METRIC], kind), type=kind, help=text, unit=unit)


def _checked(pairs: list[tuple[str, str]]) -> Labels:
    """Return the canonical labels of a series; `Invalid` if they break a rule."""
    labels = dict(pairs)
    if len(labels) != len(pairs):
        raise Invalid("a series names a label twice")
    if not labels.get(METRIC):
        raise Invalid(f"a series has no {METRIC}: name its metric")
    return check_labels(labels.pop(METRIC), labels)


def _symbol(symbols: list[str], ref: int) -> str:
    if ref >= len(symbols):
        raise Invalid(f"the symbol {ref} is named, but there are only {len(symbols)}")
    return symbols[ref]


def _decoded_samples(fields: list[bytes], budget: FieldBudget) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the times, in milliseconds, and the values of samples."""
    data = b"".join(fields)
    if not any(len(field) % SAMPLE_BYTES for field in fields):
        columns = _plain_samples(np.frombuffer(data, np.uint8).reshape(-1, SAMPLE_BYTES))
        if columns is not None:
            return columns
    times, numbers = array("q"), array("d")
    for _, _, at, end in read_fields(data, 0, len(data), budget):
        moment, number = 0, 0.0
        for tag, _, start, _ in read_fields(data, at, end, budget):
            if tag == _VALUE:
                number = _DOUBLE.unpack_from(data, start)[0]
            elif tag == _TIME:
                moment = signed(start)
        times.append(moment)
        numbers.append(number)
    return np.frombuffer(times, np.int64), np.frombuffer(numbers, np.float64)


def _plain_samples(
    rows: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None:
    """Return times and values of samples in the usual layout, each SAMPLE_BYTES bytes; None if one has another."""
    high = rows[:, 12:] >> 7
    if not (rows[:, _FIXED_OFFSETS] == _FIXED_BYTES).all() or (high != _CONTINUED).any():
        return None
    values = np.ascontiguousarray(rows[:, 3:11]).view("<f8").reshape(-1).astype(np.float64)
    digits = (rows[:, 12:] & 127).astype(np.int64)
    return (digits << (7 * np.arange(6))).sum(axis=1), values


def _type(number: int) -> str:
    return METRIC_TYPES[number] if 0 < number < len(METRIC_TYPES) else "unknown"


def _family(metric: str, kind: str) -> str:
    """Return the metric that metadata describe: histograms and summaries have series of several names."""
    if kind in ("histogram", "summary"):
        for suffix in ("_bucket", "_count", "_sum"):
            if metric.endswith(suffix):
                return metric.removesuffix(suffix)
    return metric
