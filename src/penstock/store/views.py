"""A subscription to a store: how far its LSN and its epochs have moved.

Thread: a subscription is used by one thread at a time.
Invariant: views never go back while one process owns the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from penstock.arguments import seconds


class StoreView(NamedTuple):
    """How far a store has got.

    >>> view = store.subscribe().latest()
    >>> view.applied_epoch <= view.durable_epoch
    True
    """

    lsn: int  # new snapshots see all records up to this
    durable_epoch: int  # of the owner's writes
    applied_epoch: int


class StoreSubscription:
    """Reads the newest view of a store, and waits for newer ones. One that is not read misses views, and costs nothing.

    >>> views = store.subscribe()
    >>> epoch = store.kv("users").put(b"grace", b"1906", durable=True)
    >>> views.wait_newer(timeout_s=10).applied_epoch >= epoch
    True
    """

    def __init__(self, read: Callable[[], StoreView], wait: Callable[[int, float], StoreView]) -> None:
        self._read = read
        self._wait = wait  # for a view with a higher applied epoch than that given
        self._epoch = read().applied_epoch

    def latest(self) -> StoreView:
        """Return the newest view.

        >>> store.subscribe().latest().lsn > 0
        True
        """
        view = self._read()
        self._epoch = view.applied_epoch
        return view

    def wait_newer(self, timeout_s: float = 30.0) -> StoreView:
        """Wait for a view newer than the last one returned (initially that of `subscribe`), or raise `WaitExpired`.

        >>> subscription = store.subscribe()
        >>> epoch = users.put(b"ada", b"1815")
        >>> view = subscription.wait_newer(timeout_s=10.0)
        """
        view = self._wait(self._epoch, seconds(timeout_s, "timeout_s", math.inf))
        self._epoch = view.applied_epoch
        return view

    def unread(self, view: StoreView) -> None:
        """Let the next wait return this view, or a newer one, because it did not reach its reader.

        >>> subscription = store.subscribe()
        >>> subscription.unread(subscription.latest())
        >>> view = subscription.wait_newer(timeout_s=10.0)
        """
        self._epoch = min(self._epoch, view.applied_epoch - 1)
