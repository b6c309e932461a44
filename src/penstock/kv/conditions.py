"""The condition `kv.row`: a write happens only if a row has the LSN that its writer has read, or is absent.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from penstock.arguments import flag, whole
from penstock.errors import Invalid
from penstock.journal.partitions import PartitionId, partition_id, shard_number, table_of
from penstock.kinds import ExpectedRow
from penstock.lsm.rows import KEY_BYTES_MAX
from penstock.partition.ledger_records import KindCondition, TableInfo, Verdict

ROW = "kv.row"
LSN_MAX = (1 << 63) - 1
_ARGUMENT = struct.Struct(">QIQ")  # table, shard, expected LSN (0: absent); the key follows


def expected_lsn(if_lsn: Any, if_absent: Any) -> int:
    """Return the LSN that a user's `if_lsn=` or `if_absent=` expects, 0 for an absent row; `Invalid` if unclear."""
    if if_lsn is None:
        if not flag(if_absent, "if_absent"):
            raise Invalid("a conditional write needs if_lsn= or if_absent=True")
        return 0
    if flag(if_absent, "if_absent"):
        raise Invalid("give if_lsn= or if_absent=True, not both")
    return whole(if_lsn, "if_lsn", 0, LSN_MAX)


def encode_argument(partition: PartitionId, key: bytes, lsn: int) -> bytes:
    """Encode the argument of a condition."""
    return _ARGUMENT.pack(table_of(partition), shard_number(partition), lsn) + key


def decode_argument(argument: bytes) -> ExpectedRow:
    """Decode the argument of a condition. Requires: `check_argument` has passed."""
    table, shard, lsn = _ARGUMENT.unpack_from(argument)
    return ExpectedRow(partition_id(table, shard), argument[_ARGUMENT.size :], lsn)


def check_argument(info: TableInfo, argument: bytes) -> None:
    """Raise `Invalid` if an argument is malformed or not of this table."""
    if not _ARGUMENT.size <= len(argument) <= _ARGUMENT.size + KEY_BYTES_MAX:
        raise Invalid("a condition on a row of a kv table is malformed")
    table, shard, lsn = _ARGUMENT.unpack_from(argument)
    if table != info.table_id or shard >= info.shards or lsn > LSN_MAX:
        raise Invalid(f"a condition on a row does not fit table {info.name}")


def _never_judged(
    argument: bytes, read: Callable[[bytes], bytes | None], write: Callable[[bytes, bytes | None], None]
) -> Verdict:
    """Refuse: the owner judges this condition before the journal, so that the ledger never meets it."""
    return Verdict.REFUSED


CONDITIONS: Mapping[str, KindCondition] = {ROW: _never_judged}
