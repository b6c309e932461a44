"""Who is connected over the network: strangers, who have shown no token yet, and clients, who have.

Strangers and clients have budgets of their own, of connections and of bytes, so that nobody without a token can take
what a client needs. At a full budget somebody goes: of the strangers, the oldest of the address that has the most; of
the clients, one without a request, or else the newcomer; of those who send too much, the one who has the most.

Thread: the guard's.
Invariant: at most `strangers_max` strangers and `clients_max` clients are connected, but for those who were told to go.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.protocol.wire import MESSAGE_BYTES_MAX

STRANGERS_MAX, CLIENTS_MAX = 64, 256  # connections, where the process may open enough files
STRANGERS_BYTES_MAX = 2 * MESSAGE_BYTES_MAX  # of requests that have come in and are not answered
CLIENTS_BYTES_MAX = 512 << 20


class RefusedError(Exception):
    """Somebody broke a limit."""


class Caller:
    """One connection."""

    def __init__(self, address: str, hang_up: Callable[[Caller], object]) -> None:
        self.address = address
        self.hang_up = hang_up
        self.begun = False  # somebody speaks with it
        self.is_client = False  # a request of it was answered, which needs a token
        self.leaving = False
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
        """Of all requests of clients, or of strangers."""
        return self._bytes[clients]

    def _staying(self, *, clients: bool) -> list[Caller]:
        return [caller for caller in self._callers if caller.is_client == clients and not caller.leaving]

    def enter(self, caller: Caller) -> None:
        """Let a stranger in; another one may have to go."""
        self._callers[caller] = None
        strangers = self._staying(clients=False)
        if len(strangers) > self._strangers_max:
            _tell_to_go(_of_most_common_address(strangers))

    def recognise(self, caller: Caller) -> None:
        """Somebody has shown a token. `RefusedError` if there are too many clients, and each of them is busy."""
        if caller.is_client:
            return
        clients = self._staying(clients=True)
        if len(clients) >= self._clients_max:
            idle = sorted((each for each in clients if not each.requests), key=lambda each: each.idle_since_s)
            if not idle:
                raise RefusedError("too many clients")
            _tell_to_go(_of_most_common_address(idle))
        self._bytes[False] -= caller.bytes
        self._bytes[True] += caller.bytes
        caller.is_client = True

    def expire(self, caller: Caller) -> None:
        """Its time to show a token is over."""
        if not caller.is_client:
            _tell_to_go(caller)

    def took(self, caller: Caller, size: int) -> None:
        """More bytes of a request have come in; `RefusedError` if it is this caller who has to go for them."""
        caller.bytes += size
        self._bytes[caller.is_client] += size
        if self._bytes[caller.is_client] > (CLIENTS_BYTES_MAX if caller.is_client else STRANGERS_BYTES_MAX):
            greediest = max(self._staying(clients=caller.is_client), key=lambda each: each.bytes, default=caller)
            if greediest is caller:
                raise RefusedError("too many bytes under way")
            _tell_to_go(greediest)

    def gave(self, caller: Caller, size: int) -> None:
        """A request has ended."""
        caller.bytes -= size
        self._bytes[caller.is_client] -= size

    def leave(self, caller: Caller) -> None:
        """Nothing of it is here any more."""
        self._callers.pop(caller, None)
        self.gave(caller, caller.bytes)


def _tell_to_go(caller: Caller) -> None:
    if not caller.leaving:
        caller.leaving = True
        caller.hang_up(caller)


def _of_most_common_address(callers: Iterable[Caller]) -> Caller:
    """The first of the address that has the most."""
    listed = list(callers)
    counts = Counter(caller.address for caller in listed)
    return max(listed, key=lambda caller: counts[caller.address])


def budgets() -> tuple[int, int]:
    """How many strangers and clients may be connected: each takes three descriptors, and the store needs most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return STRANGERS_MAX, CLIENTS_MAX
    return min(STRANGERS_MAX, max(8, descriptors // 32)), min(CLIENTS_MAX, max(8, descriptors // 12))
