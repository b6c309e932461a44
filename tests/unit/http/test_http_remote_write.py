"""Remote write: what Prometheus sends becomes columns, and what a stranger sends is refused in one line."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import Invalid
from penstock.http import remote_write
from penstock.http.remote_write import BODY_BYTES_MAX, decode_write, decompressed, write_version
from penstock.http.samples import LabelCache
from penstock.series.section import STALE_BITS

STALE = struct.unpack("<d", struct.pack("<Q", STALE_BITS))[0]
T = 1_700_000_000_000


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    encoding = bytearray()
    while number > 127:
        encoding.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoding, number])


def block(number: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(number << 3 | 2) + varint(len(data)) + data


def whole(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def sample(value: float, moment: int) -> bytes:
    return block(2, b"\x09" + struct.pack("<d", value) + whole(2, moment))


def labels(**pairs: str) -> bytes:
    return b"".join(block(1, block(1, name) + block(2, value)) for name, value in pairs.items())


def snappy(data: bytes) -> bytes:
    packed: bytes = pa.Codec("snappy").compress(data, asbytes=True)
    return packed


V1 = b"".join(
    [
        block(1, labels(__name__="up", job="a") + sample(1.0, T) + sample(STALE, T + 15_000)),
        block(1, labels(__name__="h_total", job="é") + sample(-0.0, -5) + block(3, b"exemplar")),
        block(1, labels(__name__="native") + block(4, b"")),
        block(3, whole(1, 1) + block(2, "h_total") + block(4, "how many") + block(5, "hours")),
    ]
)
SYMBOLS = ["", "__name__", "up", "job", "a", "how", "s", "h_bucket", "le", "1"]
V2 = b"".join(block(4, symbol) for symbol in SYMBOLS) + b"".join(
    [
        block(5, block(1, bytes([1, 2, 3, 4])) + sample(1.0, T) + sample(STALE, T + 15_000)),
        block(
            5,
            block(1, bytes([1, 7, 8, 9]))
            + sample(2.0, T)
            + block(3, b"")
            + block(5, whole(1, 3) + whole(3, 5) + whole(4, 6)),
        ),
    ]
)


def test_version_1() -> None:
    columns = decode_write(snappy(V1), 1)
    assert [dict(label_set) for label_set in columns.series] == [
        {"__name__": "up", "job": "a"},
        {"__name__": "h_total", "job": "é"},
        {"__name__": "native"},
    ]
    assert columns.index.tolist() == [0, 0, 1]
    assert columns.times_us.tolist() == [T * 1000, (T + 15_000) * 1000, -5_000]
    assert columns.values.view(np.uint64).tolist() == [0x3FF0000000000000, int(STALE_BITS), 1 << 63]
    assert [(m.metric, m.type, m.unit, m.help) for m in columns.metadata] == [
        ("h_total", "counter", "hours", "how many")
    ]
    assert columns.left_out == 1


def test_version_2() -> None:
    columns = decode_write(snappy(V2), 2)
    assert [dict(label_set) for label_set in columns.series] == [
        {"__name__": "up", "job": "a"},
        {"__name__": "h_bucket", "le": "1"},
    ]
    assert columns.index.tolist() == [0, 0, 1]
    assert columns.values.view(np.uint64).tolist()[:2] == [0x3FF0000000000000, int(STALE_BITS)]
    assert [(m.metric, m.type, m.unit, m.help) for m in columns.metadata] == [("h", "histogram", "s", "how")]
    assert columns.left_out == 1


def test_an_empty_request() -> None:
    for version in (1, 2):
        assert len(decode_write(snappy(b""), version)) == 0


def test_samples_reach_a_table_bit_by_bit(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        metrics = store.series("metrics")
        metrics.write_block(decode_write(snappy(V1), 1).to_block())
        bits = metrics.select('up{job="a"}').column("value").to_numpy().view(np.uint64).tolist()
        assert bits == [0x3FF0000000000000, int(STALE_BITS)]
        assert metrics.select("{}").num_rows == 3


@pytest.mark.parametrize(
    ("content_type", "version"),
    [
        ("application/x-protobuf", 1),
        ("application/x-protobuf;proto=prometheus.WriteRequest", 1),
        ("Application/X-Protobuf; proto=io.prometheus.write.v2.Request", 2),
    ],
)
def test_the_content_type_names_the_version(content_type: str, version: int) -> None:
    assert write_version(content_type) == version


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-protobuf;proto=x.Y"])
def test_other_content_types_are_refused(content_type: str) -> None:
    with pytest.raises(Invalid, match="remote write"):
        write_version(content_type)


UNNAMED = block(1, labels(job="a") + sample(1.0, T))
TWICE = block(1, labels(__name__="a") + labels(__name__="b") + sample(1.0, T))
FLOOD = block(1, labels(__name__="a", **{f"l{n}": "x" for n in range(64)}) + sample(1.0, T))
FAR = block(1, labels(__name__="a") + sample(1.0, 1 << 62))


@pytest.mark.parametrize(
    ("data", "version", "reason"),
    [
        (UNNAMED, 1, "no __name__"),
        (TWICE, 1, "twice"),
        (FLOOD, 1, "at most 64"),
        (FAR, 1, "years 1 to 9999"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 1, "not a request"),
        (block(1, block(1, block(1, b"\xff\xfe"))), 1, "not a request"),
        (block(4, "x") + block(5, block(1, b"\0\0")), 2, "empty text"),
        (block(4, "") + block(5, block(1, b"\0\1")), 2, "symbol 1"),
        (block(4, "") + block(5, block(1, b"\0\0\0")), 2, "pairs"),
        (block(4, "") + block(5, block(1, b"\0" * 130)), 2, "at most 64"),
        (block(4, "") + block(5, block(1, b"\xff\xff\xff\xff\x0f\0")), 2, "symbol 4294967295"),
    ],
)
def test_malformed_requests_are_refused(data: bytes, version: int, reason: str) -> None:
    with pytest.raises(Invalid, match=reason) as refused:
        decode_write(snappy(data), version)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        varint(BODY_BYTES_MAX + 1) + b"\0" * 10,
        varint((1 << 32) - 1) + b"x",
        b"\xff" * 20,
        b"\x80\x80\x80\x80\x80\x01",
        b"",
        b"\x05abc",
        b"\x00abc",
        snappy(V1)[:-3],
        snappy(V1) + b"\0",
        varint(1000) + snappy(V1)[2:],
    ],
)
def test_what_is_not_snappy_or_too_large_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid, match="the body"):
        decompressed(body)


@given(st.binary(max_size=300), st.sampled_from([1, 2]), st.booleans())
def test_random_bytes_are_refused_or_decoded(data: bytes, version: int, packed: bool) -> None:
    try:
        decode_write(snappy(data) if packed else data, version)
    except Invalid as refused:
        assert "\n" not in str(refused)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)
SAMPLES = st.tuples(st.floats(width=64), st.integers(-(10**13), 10**14))
FIELDS = st.one_of(
    st.builds(lambda pair: ("label", pair), st.tuples(TEXTS, TEXTS)),
    st.builds(lambda point: ("sample", point), SAMPLES),
    st.just(("other", None)),
)


@given(st.lists(st.tuples(TEXTS, st.lists(FIELDS, max_size=6)), max_size=4), st.booleans())
def test_fields_in_any_order_and_number(entries: list[tuple[str, list[tuple[str, Any]]]], repeated: bool) -> None:
    """Whatever order a sender chooses, however long a number: the same samples, with a cache and without."""
    body, expected = b"", []
    for metric, fields in entries:
        label_set = {"__name__": metric}
        data = labels(__name__=metric)
        for kind, content in fields:
            if kind == "label" and content[0] not in label_set:
                label_set[content[0]] = content[1]
                data += block(1, block(1, content[0]) + block(2, content[1]))
            elif kind == "sample":
                data += sample(*content)
                expected.append((label_set, content[1] * 1_000, struct.pack("<d", content[0])))
            elif kind == "other":
                data += whole(9, 1 << 63) + block(70, b"unknown") + b"\x55abcd"
        body += block(1, data)
    cache = LabelCache()
    for _ in range(1 + repeated):
        columns = decode_write(snappy(body), 1, cache)
    series = [dict(pairs) for pairs in columns.series]
    samples = zip(columns.index.tolist(), columns.times_us.tolist(), columns.values.tolist(), strict=True)
    assert [(series[n], at, struct.pack("<d", value)) for n, at, value in samples] == expected


def test_a_request_of_prometheus_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample for each series, labels first: decoded together, labels from the cache the second time."""
    body = snappy(b"".join(block(1, labels(__name__="m", n=str(n)) + sample(n / 7, T + n)) for n in range(50)))
    cache = LabelCache()
    first = decode_write(body, 1, cache)
    monkeypatch.setattr(remote_write, "check_labels", None)
    monkeypatch.setattr(remote_write, "signed", None)
    monkeypatch.setattr(remote_write, "read_fields", None)
    again = decode_write(body, 1, cache)
    assert again.values.tolist() == first.values.tolist() == [n / 7 for n in range(50)]
    assert again.times_us.tolist() == [(T + n) * 1_000 for n in range(50)]
    assert again.series == first.series
    assert again.table is decode_write(body, 1, cache).table
    tables = [columns.to_block() for columns in (first, again)]
    assert tables[0].series.encode() == tables[1].series.encode()


REPEATED = b"".join(block(1, labels(__name__="m", n=str(n % 5)) + sample(n / 7, T + n)) for n in range(8))
WARM = LabelCache()
decode_write(snappy(REPEATED), 1, WARM)


@given(
    st.lists(st.tuples(st.integers(0, len(REPEATED) - 1), st.integers(0, 255)), max_size=3),
    st.tuples(st.integers(0, len(REPEATED)), st.integers(0, 40)),
    st.binary(max_size=20),
)
def test_a_damaged_request_of_known_series_is_decoded_as_by_a_new_server(
    changes: list[tuple[int, int]], cut: tuple[int, int], added: bytes
) -> None:
    data = bytearray(REPEATED)
    for position, byte in changes:
        data[position] = byte
    data[cut[0] : sum(cut)] = added
    outcomes: list[Any] = []
    for cache in (None, WARM):
        try:
            samples = decode_write(snappy(bytes(data)), 1, cache)
            columns = [samples.index.tolist(), samples.times_us.tolist(), samples.values.tobytes()]
            outcomes.append(([*samples.series], *columns, [*samples.metadata], samples.left_out))
        except Invalid as refused:
            outcomes.append(str(refused))
    assert outcomes[0] == outcomes[1]


def test_a_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.samples.CACHED_BYTES_MAX", 10_000)
    cache = LabelCache()
    for n in range(100):
        columns = decode_write(snappy(block(1, labels(__name__=f"m{n}") + sample(1.0, T))), 1, cache)
        assert columns.series == [(("__name__", f"m{n}"),)]
        assert len(cache._current._by_form) < 12
    for n in range(20):  # label tables count, too
        body = snappy(b"".join(block(1, labels(__name__=f"t{m}") + sample(1.0, T)) for m in {n, n + 1, n + 2}))
        for _ in range(2):
            assert len(decode_write(body, 1, cache).series) == 3
        assert len(cache._current._tables) < 12


@given(st.integers(0, len(V2) * 8 - 1))
def test_a_flipped_bit_is_refused_or_decoded(bit: int) -> None:
    data = bytearray(V2)
    data[bit // 8] ^= 1 << bit % 8
    try:
        decode_write(snappy(bytes(data)), 2)
    except Invalid as refused:
        assert "\n" not in str(refused)


def test_too_many_series_and_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = b"".join(block(1, labels(__name__=f"m{n}") + sample(1.0, T)) for n in range(4))
    monkeypatch.setattr("penstock.http.samples.SERIES_MAX", 3)
    with pytest.raises(Invalid, match="at most 3 series"):
        decode_write(snappy(many), 1)
    monkeypatch.undo()
    monkeypatch.setattr("penstock.http.samples.SAMPLES_MAX", 3)
    with pytest.raises(Invalid, match="at most 3 samples"):
        decode_write(snappy(many), 1)


@pytest.mark.parametrize("version", [1, 2])
def test_one_request_does_not_fill_a_cache_past_its_bound(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.samples.CACHED_BYTES_MAX", 10_000)
    cache, current = LabelCache(), LabelCache()._current
    monkeypatch.setattr(cache, "_current", current)
    if version == 1:
        data = b"".join(block(1, labels(__name__=f"m{n}") + sample(1.0, T)) for n in range(300))
    else:
        symbols = b"".join(block(4, text) for text in ["", "__name__", *(f"m{n}" for n in range(100))])
        data = symbols + b"".join(block(5, block(1, bytes([1, 2 + n])) + sample(1.0, T)) for n in range(100))
    columns = decode_write(snappy(data), version, cache)
    assert len({*columns.series}) == len(columns.series) == len(columns.values) == (300 if version == 1 else 100)
    assert 0 < len(current._by_form) == len(current._by_labels) < 10
    again = decode_write(snappy(data), version, cache)
    assert again.series == columns.series
    assert cache._current is not current


def test_a_label_table_that_is_too_large_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    data = snappy(b"".join(block(1, labels(__name__=f"m{n}") + sample(1.0, T)) for n in range(100)))
    cache = LabelCache()
    decode_write(data, 1, cache)
    cache._current._table_room = 1_000
    monkeypatch.setattr("penstock.http.samples.CACHED_BYTES_MAX", 1_000)
    assert len(decode_write(data, 1, cache).series) == 100
    assert cache._current._tables == {}
