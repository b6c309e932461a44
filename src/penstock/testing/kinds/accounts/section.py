"""Pending bookings of one shard: (account, amount), in order.

    count u32 | for each booking: length u16, amount i64 | the accounts, one after the other

Thread: changed under the coordinator's lock; read by any thread.
Invariant: a booking that passes `check` can be applied at any time: apply checks nothing itself.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.arguments import in_short, plain_int
from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import PartitionId
from penstock.partition.pending import PendingDelta

ACCOUNT_BYTES_MAX = 100
AMOUNT_MAX = 1 << 31  # sums of 2**31 bookings fit an int64
BOOKING_BYTES = 120  # memory of a booking besides its account
_COUNT = struct.Struct("<I")
_BOOKING = struct.Struct("<Hq")


class Bookings(list[tuple[bytes, int]]):
    """Accounts and amounts."""

    __slots__ = ()


def check(account: Any, amount: Any) -> tuple[bytes, int]:
    """Return a booking as it is stored; `Invalid` if it breaks a rule."""
    data = account.encode() if isinstance(account, str) and account.isprintable() and account.isascii() else b""
    if not 0 < len(data) <= ACCOUNT_BYTES_MAX:
        raise Invalid(
            f"an account is named by 1 to {ACCOUNT_BYTES_MAX} printable ASCII letters, not {in_short(account)}"
        )
    number = plain_int(amount)
    if number is None or not -AMOUNT_MAX < number < AMOUNT_MAX:
        raise Invalid(f"an amount is a whole number below {AMOUNT_MAX} either way, not {in_short(amount)}")
    return data, number


def book(delta: PendingDelta, partition: PartitionId, account: bytes, amount: int) -> None:
    """Add a booking to the pending delta."""
    sections = delta.begin() if delta.open is None else delta.open
    bookings = sections.get(partition)
    if bookings is None:
        bookings = sections[partition] = Bookings()
    bookings.append((account, amount))


def encode(bookings: Bookings) -> bytes:
    """Encode bookings."""
    head = [_BOOKING.pack(len(account), amount) for account, amount in bookings]
    return b"".join((_COUNT.pack(len(bookings)), *head, *(account for account, _ in bookings)))


def decode(payload: bytes) -> Bookings:
    """Decode bookings; `CorruptionError` if they are malformed."""
    bookings, count = Bookings(), booking_count(payload)
    at = _COUNT.size + count * _BOOKING.size
    for index in range(count):
        length, amount = _BOOKING.unpack_from(payload, _COUNT.size + index * _BOOKING.size)
        bookings.append((payload[at : at + length], amount))
        at += length
    if at != len(payload) or len(payload) < _COUNT.size or count != _COUNT.unpack_from(payload)[0]:
        raise CorruptionError("bookings", 0, "their length is wrong")
    return bookings


def booking_count(payload: bytes) -> int:
    """Return the count that a payload states, capped by what its length allows."""
    count: int = _COUNT.unpack_from(payload)[0] if len(payload) >= _COUNT.size else 0
    return min(count, max(0, len(payload) - _COUNT.size) // _BOOKING.size)


def receive(payload: bytes) -> Bookings:
    """Decode and check the bookings that another process sent."""
    try:
        bookings = decode(payload)
        if not bookings:
            raise Invalid("a section of accounts holds no bookings")
        for account, amount in bookings:
            check(account.decode("ascii"), amount)
    except (CorruptionError, UnicodeDecodeError) as error:
        raise Invalid(f"a section of accounts is malformed: {error}") from None
    return bookings
