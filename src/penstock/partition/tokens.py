"""Tokens of a producer: which numbers were used, so that a batch with a token counts once.

A producer's row holds the highest number used and a bitmap of the 1,024 numbers below it. Whether an older number was
used is not known any more: it is refused as too old, never called a duplicate.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.arguments import in_short, text, whole
from penstock.errors import Invalid, TokenTooOld
from penstock.partition.ledger_records import Verdict

PRODUCER_IDLE_US = 30 * 24 * 3600 * 1_000_000  # then a producer's tokens are deleted
PRODUCER_BYTES_MAX = 512
TOKEN_WINDOW = 1_024  # numbers remembered below a producer's highest


class _Tokens(msgspec.Struct, frozen=True, array_like=True):
    highest: int
    seen: bytes  # bit i: the number `highest - 1 - i` was used
    time_us: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Tokens).decode


def use_number(row: bytes | None, number: int, time_us: int) -> tuple[Verdict, bytes | None]:
    """Return the verdict on a number, and the producer's new row, which is None unless the number is accepted."""
    tokens = _Tokens(-1, b"", 0) if row is None else _decode(row)
    window = int.from_bytes(tokens.seen, "little")
    if number > tokens.highest:
        shift = number - tokens.highest
        mask = (1 << TOKEN_WINDOW) - 1
        window = ((window << shift) | (1 << (shift - 1))) & mask if tokens.highest >= 0 and shift <= TOKEN_WINDOW else 0
        highest = number
    elif number == tokens.highest:
        return Verdict.DUPLICATE, None
    else:
        bit = tokens.highest - 1 - number
        if bit >= TOKEN_WINDOW:
            return Verdict.TOKEN_TOO_OLD, None
        if window >> bit & 1:
            return Verdict.DUPLICATE, None
        window |= 1 << bit
        highest = tokens.highest
    return Verdict.ACCEPTED, _encode(_Tokens(highest, window.to_bytes(TOKEN_WINDOW // 8, "little"), time_us))


def is_idle(row: bytes, time_us: int) -> bool:
    """Whether a producer used no token for so long, by record time, that its row can go."""
    return _decode(row).time_us + PRODUCER_IDLE_US <= time_us


def check_token(token: Any) -> tuple[str, int]:
    """Check a token that a user passed, and return it as (producer, number)."""
    if not isinstance(token, tuple) or len(token) != 2:
        raise Invalid(f"a token is (producer, number), a short text and an integer from 0, not {in_short(token)}")
    producer = text(token[0], "the producer in a token (producer, number)", PRODUCER_BYTES_MAX)
    return producer, whole(token[1], "the number in a token (producer, number)", 0, (1 << 63) - 1)


def token_too_old(token: tuple[str, int] | None) -> TokenTooOld:
    """Return the error for a token below the window of its producer."""
    return TokenTooOld(
        f"token {token} is more than {TOKEN_WINDOW:,} below the highest of its producer, so nothing was written: read "
        "the data to see whether it was before, and use a higher number for what is new"
    )
