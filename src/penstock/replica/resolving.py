"""Host names of members, looked up in a thread of their own: a name server that does not answer delays no heartbeat.

Thread: `find` from the loop's; each lookup has a thread.
Invariant: at most one lookup of a name runs at a time.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading

from penstock.errors import ProcessLimit
from penstock.host import threads

logger = logging.getLogger(__name__)

LOOKUP_S = 10.0  # at the start of a member, for its own name


class Resolver:
    """Finds the addresses of hosts."""

    def __init__(self) -> None:
        self._lookups: dict[str, threading.Thread] = {}
        self._addresses: dict[str, str] = {}

    def find(self, host: str, *, wait: bool = False) -> str | None:
        """Return an address of a host; None while it is unknown. Each call starts a new lookup, for the next call."""
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            pass
        lookup = self._lookups.get(host)
        if lookup is None or not lookup.is_alive():
            try:
                lookup = self._lookups[host] = threads.spawn(lambda: self._look_up(host), name="penstock-resolver")
            except ProcessLimit as error:  # too many threads: the next call tries again
                logger.warning("%s is not looked up: %s", host, error)
                return self._addresses.get(host)
        if wait:
            lookup.join(LOOKUP_S)
        return self._addresses.get(host)

    def _look_up(self, host: str) -> None:
        try:
            self._addresses[host] = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            logger.debug("%s is not known: %s", host, error)
