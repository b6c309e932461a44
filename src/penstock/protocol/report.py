"""The first line that a started owner prints.

Thread: values.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.wire import ErrorMessage


class OwnerReport(msgspec.Struct, frozen=True):
    """The owner serves, or `fault` says why it could not start."""

    fault: ErrorMessage | None = None
