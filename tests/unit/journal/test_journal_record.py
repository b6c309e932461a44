"""The body of a journal record: golden bytes, round trips, and no surprise from any bytes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId, partition_id
from penstock.journal.record import (
    REFERENCE,
    Group,
    JournalRecord,
    Section,
    SegmentedRecordHeader,
    decode,
    encode,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "journal" / "record_v1.bin"

headers = st.builds(
    SegmentedRecordHeader,
    st.integers(0, (1 << 64) - 1).map(PartitionId),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, (1 << 32) - 1),
)
groups = st.builds(
    Group,
    st.lists(st.builds(Section, headers, st.binary(max_size=40)), max_size=4).map(tuple),
    st.binary(max_size=20),
)
records = st.builds(
    JournalRecord, st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 64) - 1), st.lists(groups, max_size=4).map(tuple)
)


def example() -> JournalRecord:
    return JournalRecord(
        1_700_000_000_000_000,
        (3 << 40) | 7,
        (
            Group((Section(SegmentedRecordHeader(partition_id(2, 1)), b"hello"),)),
            Group(
                (
                    Section(SegmentedRecordHeader(partition_id(2, 0)), b""),
                    Section(SegmentedRecordHeader(partition_id(9, 65_535), REFERENCE, 2, 77), b"12345678"),
                ),
                b"condition",
            ),
        ),
    )


def test_golden_bytes() -> None:
    assert encode(example()) == GOLDEN.read_bytes()
    assert decode(GOLDEN.read_bytes()) == example()


@given(records)
def test_round_trip(record: JournalRecord) -> None:
    assert decode(encode(record)) == record


@given(st.binary(max_size=300))
def test_any_bytes_give_a_record_or_an_error(data: bytes) -> None:
    with suppress(CorruptionError):
        decode(data)


@given(records, st.data())
def test_damage_gives_a_record_or_an_error(record: JournalRecord, data: st.DataObject) -> None:
    body = bytearray(encode(record))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    for content in (bytes(body), bytes(body[: data.draw(st.integers(0, len(body)))])):
        with suppress(CorruptionError):
            decode(content)
