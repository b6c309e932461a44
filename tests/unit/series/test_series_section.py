"""Sections and options of a series table."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import PartitionId
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.series.labels import LabelTable, check_labels
from penstock.series.options import (
    BUCKET_S_MIN,
    BUCKET_ZERO,
    TIME_MAX,
    TIME_MIN,
    SeriesOptions,
    check_series_options,
    decode_series_options,
    encode_series_options,
)
from penstock.series.rules import receive_section
from penstock.series.section import (
    STALE_BITS,
    BucketTrim,
    MetricMetadata,
    Part,
    SampleBlock,
    SeriesDelete,
    SeriesKey,
    SeriesSection,
    append_sample,
)
from penstock.series.section_codec import compressed, decode_section, encode_section, section_weight

P = PartitionId(1)
BITS = [0, 1, STALE_BITS, 0x7FF8_0000_0000_0001, 0x7FF0 << 48, 0xFFF0 << 48, 1 << 63]


def block(samples: list[tuple[str, int, int]]) -> SampleBlock:
    hosts = list(dict.fromkeys(host for host, _, _ in samples))
    table = LabelTable.of([check_labels("cpu", {"host": host}) for host in hosts])
    index = np.array([hosts.index(host) for host, _, _ in samples], np.uint32)
    times = np.array([time for _, time, _ in samples], np.int64)
    return SampleBlock(table, index, times, np.array([bits for _, _, bits in samples], np.uint64))


def described(parts: list[Part]) -> list[object]:
    return [
        [(part.series.labels(i), t, b) for i, t, b in zip(part.index, part.times, part.bits, strict=True)]
        if isinstance(part, SampleBlock)
        else part
        for part in parts
    ]


SAMPLES = st.tuples(st.sampled_from("abc"), st.integers(TIME_MIN, TIME_MAX - 1), st.sampled_from(BITS))
PARTS = st.one_of(
    st.lists(SAMPLES, min_size=1, max_size=6).map(block),
    st.builds(
        MetricMetadata, st.sampled_from(["cpu", "é"]), st.sampled_from(["", "gauge"]), st.just("s"), st.just("é")
    ),
    st.builds(SeriesDelete, st.just('cpu{host="a"}'), st.integers(-5, 5), st.integers(6, 9)),
)


@given(st.lists(PARTS, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_sections_come_back_and_cuts_are_refused(parts: list[Part]) -> None:
    payload = encode_section(SeriesSection(*parts))
    for read in (decode_section, receive_section):
        assert described(read(payload).parts) == described(parts)
    assert encode_section(decode_section(payload)) == payload
    small = compressed(payload)
    assert described(receive_section(small).parts) == described(parts)
    assert section_weight(small) >= len(payload)
    for cut in range(0, len(small), 5):
        with pytest.raises(CorruptionError):
            decode_section(small[:cut])
    assert section_weight(payload) >= len(payload)
    for cut in range(0, len(payload), 7):
        with pytest.raises(CorruptionError):
            decode_section(payload[:cut])


def test_columns_of_one_time_and_of_series_in_order_are_short() -> None:
    rows = [(f"h{n}", 5, n) for n in range(100)]
    short = encode_section(SeriesSection(block(rows)))
    long = encode_section(SeriesSection(block([(host, time + bits, bits) for host, time, bits in reversed(rows)])))
    assert len(long) - len(short) == 99 * 8 + len(block(rows[::-1]).series.encode()) - len(block(rows).series.encode())
    moved = encode_section(SeriesSection(block([rows[1], rows[0], *rows[2:]])))
    assert len(moved) == len(short)  # the series are numbered as they appear
    assert described(decode_section(short).parts) == described([block(rows)])


def test_single_samples_become_blocks_in_order() -> None:
    delta = PendingDelta()
    a, b, again = (SeriesKey(check_labels("cpu", {"host": host}), P) for host in "aba")
    stale = struct.unpack("<d", struct.pack("<Q", STALE_BITS))[0]
    append_sample(delta, P, a, (1, 1.5))
    append_sample(delta, P, b, (1, stale))
    append_sample(delta, P, again, (2, 2.5))
    delta.open[P].log.append(SeriesDelete("cpu", 0, 2))  # type: ignore[index]
    append_sample(delta, P, a, (3, 3.5))
    assert len(delta.groups) == 1
    section = delta.groups[0].sections[P]
    first, delete, last = section.parts
    assert [first.series.labels(row)[1][1] for row in first.index] == ["a", "b", "a"]
    assert len(first.series) == 2  # two keys of one series are one row
    assert int(first.bits[1]) == STALE_BITS
    assert delete == SeriesDelete("cpu", 0, 2)
    assert last.bits.view(np.float64).tolist() == [3.5]
    append_sample(delta, P, a, (4, 4.5))
    assert section.parts[-1].times.tolist() == [3, 4]
    assert described(decode_section(encode_section(section)).parts) == described(section.parts)


def test_groups_of_sections_are_absorbed_in_order() -> None:
    delta, group = PendingDelta(), PendingGroup()
    append_sample(delta, P, SeriesKey(check_labels("cpu", None), P), (1, 1.0))
    group.sections = {P: SeriesSection(block([("a", 1, 1)]), SeriesDelete("cpu"))}
    assert delta.absorb(group)
    assert [type(part) for part in delta.groups[0].sections[P].parts] == [SampleBlock, SampleBlock, SeriesDelete]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (block([("a", TIME_MAX, 0)]), "outside the years 1 to 9999"),
        (block([("a", TIME_MIN - 1, 0), ("a", 0, 0)]), "outside the years 1 to 9999"),
        (block([]), "no samples"),
        (
            SampleBlock(block([("a", 1, 1)]).series, *(np.array([n], d) for n, d in ((1, "u4"), (1, "i8"), (1, "u8")))),
            "does not have",
        ),
        (
            SampleBlock(
                block([("a", 1, 1), ("b", 1, 1)]).series,
                *(np.array([n], d) for n, d in ((0, "u4"), (1, "i8"), (1, "u8"))),
            ),
            "a series of a block has no samples",
        ),
        (MetricMetadata("", "gauge"), "a metric is a text"),
        (MetricMetadata("cpu", "gauge!"), "is not a type of metrics"),
        (MetricMetadata("cpu", "", "x" * 5000), "the unit of a metric"),
        (SeriesDelete("cpu{", 0, 1), "expected a label"),
        (SeriesDelete("cpu", 1, 1), "runs upwards"),
        (BucketTrim(5), "only the owner"),
    ],
)
def test_what_another_process_sends_is_checked(part: Part, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        receive_section(encode_section(SeriesSection(part)))


def test_an_empty_section_and_foreign_bytes_are_refused() -> None:
    with pytest.raises(Invalid, match="holds nothing"):
        receive_section(encode_section(SeriesSection()))
    for payload in (
        b"",
        b"\1",
        b"\2\0\0\0\0\0\0\0",
        b"\2\0\0\0\xff\xff\xff\xff",
        b"\2\0\0\0\7\0\0\0abc",
        b"\3\0\0\0\0\0\0\0",
        b"\1\0\0\0\xff\xff\xff\xff",
        b"\1\0\0\0\1\0\0\0\x09\0\0\0\0\0\0\0",
    ):
        with pytest.raises(Invalid, match="malformed"):
            receive_section(payload)


def test_a_count_takes_no_memory_before_it_is_checked() -> None:
    payload = bytearray(encode_section(SeriesSection(block([("a", 1, 1), ("b", 1, 1)]))))
    at = 8 + 8 + 4  # the count of the block's samples
    payload[at : at + 4] = struct.pack("<I", 0xFFFF_FFFF)
    with pytest.raises(Invalid, match="malformed"):
        receive_section(bytes(payload))


# -- options


def test_options_come_back_and_every_time_has_a_bucket() -> None:
    options = SeriesOptions(bucket_s=BUCKET_S_MIN, window_s=3600, retention_s=1e6, series_max=10)
    assert decode_series_options(encode_series_options(check_series_options(options))) == options
    assert check_series_options(None) == SeriesOptions()
    times = np.array([TIME_MIN, -1, 0, TIME_MAX - 1], np.int64)
    buckets = options.buckets(times).tolist()
    assert buckets == [options.bucket(int(time)) for time in times]
    assert buckets[1:3] == [BUCKET_ZERO - 1, BUCKET_ZERO]
    assert 0 < buckets[0] < buckets[-1] < 1 << 32
    for time, bucket in zip(times.tolist(), buckets, strict=True):
        assert options.bucket_start(bucket) <= time < options.bucket_start(bucket + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_s": 1},
        {"bucket_s": 86_400.5},
        {"window_s": 0},
        {"future_s": -1},
        {"retention_s": float("nan")},
        {"series_max": 0},
        {"metric_series_max": 1 << 32},
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(Invalid, match=f"{next(iter(options))} of a series table"):
        SeriesOptions(**options)  # type: ignore[arg-type]


def test_options_of_another_type_are_refused() -> None:
    with pytest.raises(Invalid, match="SeriesOptions"):
        check_series_options({"bucket_s": 5})
    with pytest.raises(CorruptionError):
        decode_series_options(b"\xc1")
