"""What a started owner says in its first line.

Thread: values.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.wire import ErrorMessage


class OwnerReport(msgspec.Struct, frozen=True):
    """Nothing is wrong, or what is."""

    fault: ErrorMessage | None = None
