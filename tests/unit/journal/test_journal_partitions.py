"""Partition numbers and the shard of a key: values that stored data depends on."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.journal.partitions import partition_id, shard_number, shard_of, shards_of, table_of

# The low 16 bits of xxh3-64 (seed 0) are the shard in a table of 65,536 shards. Never change these: rows of existing
# stores lie in the shards that they name.
GOLDEN = {
    b"": (0, 0, 1, 4, 138, 38082),
    b"\0": (0, 1, 0, 2, 883, 60635),
    b"ada": (0, 1, 0, 6, 959, 32815),
    b"grace": (0, 0, 2, 1, 992, 30096),
    b"k" * 300: (0, 0, 0, 5, 296, 64160),
    "zoë".encode(): (0, 0, 1, 5, 642, 7842),
}
COUNTS = (1, 2, 3, 7, 1_000, 65_536)


@pytest.mark.parametrize("key", GOLDEN)
def test_a_key_stays_in_its_shard(key: bytes) -> None:
    assert tuple(shard_of(key, count) for count in COUNTS) == GOLDEN[key]


@pytest.mark.parametrize(("column", "count"), list(enumerate(COUNTS)))
def test_a_column_of_keys_goes_to_the_same_shards(column: int, count: int) -> None:
    expected = [shards[column] for shards in GOLDEN.values()]
    assert shards_of(pa.array(GOLDEN, pa.binary()), count).tolist() == expected
    assert shards_of(pa.array(GOLDEN, pa.large_binary()), count).tolist() == expected


@given(st.lists(st.none() | st.binary(max_size=20)), st.integers(2, 9))
def test_rows_without_a_key_go_where_the_caller_says(keys: list[bytes | None], count: int) -> None:
    expected = [count - 1 if key is None else shard_of(key, count) for key in keys]
    assert shards_of(pa.array(keys, pa.binary()), count, keyless=count - 1).tolist() == expected


def test_partition_numbers_are_a_format() -> None:
    assert partition_id(1, 0) == 65_536
    assert partition_id(2, 3) == 131_075
    assert partition_id((1 << 48) - 1, 65_535) == (1 << 64) - 1


@given(st.integers(1, (1 << 48) - 1), st.integers(0, 65_535))
def test_a_partition_number_gives_its_table_and_shard(table: int, shard: int) -> None:
    partition = partition_id(table, shard)
    assert (table_of(partition), shard_number(partition)) == (table, shard)


@pytest.mark.parametrize(("table", "shard"), [(0, 0), (1 << 48, 0), (1, -1), (1, 1 << 16)])
def test_partition_numbers_have_limits(table: int, shard: int) -> None:
    with pytest.raises(Invalid):
        partition_id(table, shard)
