"""The network connections: strangers, which have shown no token yet, and clients, which have.

Strangers and clients have separate budgets of connections and bytes, so that strangers cannot use up what clients need.
When a budget is full, a connection is closed: of the strangers, the oldest of the address that has the most; of the
clients, an idle one, or else the new one; of those that send too much, the one with the most bytes.

Thread: the guard's.
Invariant: at most `strangers_max` strangers and `clients_max` clients are connected, besides those being closed.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.protocol.wire import MESSAGE_BYTES_MAX

STRANGERS_MAX, CLIENTS_MAX = 64, 256  # connections, where the process may open enough files
STRANGERS_BYTES_MAX = 2 * MESSAGE_BYTES_MAX  # of requests received and not answered
CLIENTS_BYTES_MAX = 512 << 20


class RefusedError(Exception):
    """A connection broke a limit."""


class Caller:
    """One connection."""

    def __init__(self, address: str, disconnect: Callable[[Caller], object]) -> None:
        self.address = address
        self.disconnect = disconnect
        self.begun = False  # its task runs
        self.is_client = False  # one of its requests was answered, which needs a token
        self.closing = False
        self.bytes = 0  # of its requests
        self.requests = 0
        self.idle_since_s = 0.0  # when its last request ended


class Callers:
    """All connections."""

    def __init__(self, strangers_max: int = STRANGERS_MAX, clients_max: int = CLIENTS_MAX) -> None:
        self._strangers_max = strangers_max
        self._clients_max = clients_max
        self._callers: dict[Caller, None] = {}  # the oldest first
        self._bytes = {False: 0, True: 0}  # of strangers, and of clients

    def __len__(self) -> int:
        return len(self._callers)

    def bytes(self, *, clients: bool) -> int:
        """Return the bytes of all requests of clients, or of strangers."""
        return self._bytes[clients]

    def _staying(self, *, clients: bool) -> list[Caller]:
        return [caller for caller in self._callers if caller.is_client == clients and not caller.closing]

    def enter(self, caller: Caller) -> None:
        """Add a stranger; another one may be closed for it."""
        self._callers[caller] = None
        strangers = self._staying(clients=False)
        if len(strangers) > self._strangers_max:
            _disconnect(_of_most_common_address(strangers))

    def recognise(self, caller: Caller) -> None:
        """Count a caller as a client: it has shown a token. `RefusedError` if all of too many clients are busy."""
        if caller.is_client:
            return
        clients = self._staying(clients=True)
        if len(clients) >= self._clients_max:
            idle = sorted((each for each in clients if not each.requests), key=lambda each: each.idle_since_s)
            if not idle:
                raise RefusedError("too many clients")
            _disconnect(_of_most_common_address(idle))
        self._bytes[False] -= caller.bytes
        self._bytes[True] += caller.bytes
        caller.is_client = True

    def expire(self, caller: Caller) -> None:
        """Close a caller that did not show a token in time."""
        if not caller.is_client:
            _disconnect(caller)

    def add_bytes(self, caller: Caller, size: int) -> None:
        """Count more bytes of a request; `RefusedError` if this caller must be closed for them."""
        caller.bytes += size
        self._bytes[caller.is_client] += size
        if self._bytes[caller.is_client] > (CLIENTS_BYTES_MAX if caller.is_client else STRANGERS_BYTES_MAX):
            greediest = max(self._staying(clients=caller.is_client), key=lambda each: each.bytes, default=caller)
            if greediest is caller:
                raise RefusedError("too many bytes under way")
            _disconnect(greediest)

    def release_bytes(self, caller: Caller, size: int) -> None:
        """Release the bytes of a request that ended."""
        caller.bytes -= size
        self._bytes[caller.is_client] -= size

    def leave(self, caller: Caller) -> None:
        """Remove a caller whose connection ended."""
        self._callers.pop(caller, None)
        self.release_bytes(caller, caller.bytes)


def _disconnect(caller: Caller) -> None:
    if not caller.closing:
        caller.closing = True
        caller.disconnect(caller)


def _of_most_common_address(callers: Iterable[Caller]) -> Caller:
    """Return the first caller of the address that has the most."""
    listed = list(callers)
    counts = Counter(caller.address for caller in listed)
    return max(listed, key=lambda caller: counts[caller.address])


def budgets() -> tuple[int, int]:
    """Return how many strangers and clients may connect: each takes three descriptors, and the store needs most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return STRANGERS_MAX, CLIENTS_MAX
    return min(STRANGERS_MAX, max(8, descriptors // 32)), min(CLIENTS_MAX, max(8, descriptors // 12))
