"""What goes through the writer's channel, and batches on their way into one transaction.

Thread: the one that has the writer's lock or its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from penstock.manifest.draft import Draft
from penstock.manifest.engine import ReadView, Transaction
from penstock.manifest.operations import CommitReceipt, Edit, ManifestOp, Waiting


class Request:
    """An `Apply` (with operations) or a `Sync` (without) in the channel."""

    __slots__ = ("answered", "error", "hint", "operations", "receipt")

    def __init__(self, operations: Sequence[ManifestOp] | None, hint: int | None) -> None:
        self.operations = operations  # None: a sync
        self.hint = hint
        self.receipt: CommitReceipt | None = None
        self.error: Exception | None = None
        self.answered: threading.Lock | None = None  # held until there is an answer, if someone waits for it


class Window:
    """Batches applied to a draft, for one transaction."""

    def __init__(self, view: ReadView, generations: Mapping[int, int], now_ms: int) -> None:
        self.open = True  # more may be applied
        self.receipts: list[CommitReceipt | None] = []  # None: of a sync
        self._draft = Draft(view)
        self._edit = Edit(self._draft, generations, now_ms)

    def apply(self, request: Request) -> None:
        """Add a batch; after an exception the window is of no use."""
        operations = request.operations
        self.receipts.append(None if operations is None else self._edit.apply(operations, request.hint))

    def write_to(self, transaction: Transaction, waiting: Waiting) -> Mapping[int, int]:
        """Make the changes in a transaction; the generations that they move."""
        self._edit.finish(waiting)
        self._draft.write_to(transaction)
        return self._edit.generations


def frees(requests: Sequence[Request]) -> bool:
    """Whether all that they do frees space."""
    return all(operation.frees for request in requests for operation in request.operations or ())
