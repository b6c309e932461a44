"""Serves a store that this process owns: a control socket from the start, Arrow Flight once a client asks for it.

Thread: one opens and closes; the control socket's thread starts the rest.
Invariant: requests are refused before the store is closed, and the sockets are removed when it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from penstock.errors import Closed, PenstockError, ProcessLimit
from penstock.host import threads
from penstock.host.forking import abandon, detach_sockets, use_grpc
from penstock.host.paths import absolute
from penstock.host.randomness import Random
from penstock.protocol import locator
from penstock.server.control_socket import ControlSocket
from penstock.store.store import Store

if TYPE_CHECKING:
    import ssl

    from penstock.server.flight import FlightGateway
    from penstock.server.gateway import Gateway
    from penstock.server.guard import Guard
    from penstock.server.rights import Rights

logger = logging.getLogger(__name__)

MAINTAIN_S = 1.0
SHUTDOWN_S = 10.0


# Both weak: a service holds its store, so a strong one here would keep every closed store alive.
_services: WeakKeyDictionary[Store, ref[Service]] = WeakKeyDictionary()


def service_of(store: Store) -> Service | None:
    """Return the service of a store that this process opened; None if it is not served."""
    service = _services.get(store)
    return None if service is None else service()


class Service:
    """Everything that serves one owned store: control socket, gateway, Flight servers, guards."""

    def __init__(self, store: Store, *, random: Random, detached: bool = False) -> None:
        self._store = store
        self._random = random
        self._detached = detached
        self._lock = threads.lock("server.service")
        self._gateway: Gateway | None = None  # guarded by _lock
        self._servers: list[FlightGateway] = []  # guarded by _lock
        self._guards: list[Guard] = []  # guarded by _lock
        self._location = ""  # guarded by _lock
        self._ended = threading.Event()
        self.yielded = threading.Event()  # a detached owner was asked to yield, and agreed
        self._path = absolute(store.path)
        self._folder, self._control = self._open_control_socket(self._path)
        store.at_close(self.close)
        _services[store] = ref(self)
        threads.after_fork(self, Service._disable_after_fork)

    def _open_control_socket(self, path: str) -> tuple[str, ControlSocket]:
        folder = locator.make_sockets_folder(path)
        try:
            return folder, ControlSocket(folder, self._answer)
        except ProcessLimit:
            raise
        except OSError:  # some network file systems have no sockets
            folder = locator.make_sockets_folder(path, elsewhere=True)
            return folder, ControlSocket(folder, self._answer)

    def _answer(self, question: locator.Question) -> locator.Answer:
        if question.ask == "serve":
            if self.yielded.is_set():
                return locator.Answer(yields=True, detached=self._detached, reason="it is releasing the store")
            return locator.Answer(location=self.location(), detached=self._detached)
        if not self._detached:
            return locator.Answer(reason="it was opened by a program that uses it")
        reason = self.begin_yield()
        return locator.Answer(yields=not reason, detached=True, reason=reason)

    def begin_yield(self) -> str:
        """Agree to yield, unless a client needs the owner; return the reason then, else empty."""
        with self._lock:
            gateway = self._gateway
        reason = "" if gateway is None else gateway.begin_yield()
        if not reason:
            self.yielded.set()
        return reason

    def idle_s(self) -> float:
        """Return for how many seconds no client has needed the owner."""
        gateway = self.gateway()
        return gateway.idle_s()

    # -- Arrow Flight, on demand

    def gateway(self) -> Gateway:
        """Return the gateway, created on first use."""
        from penstock.server.gateway import Gateway

        with self._lock:
            if self._gateway is None:
                gateway = Gateway(self._store, random=self._random, detached=self._detached)
                threads.spawn(self._maintain, name="penstock-gateway")
                self._gateway = gateway  # last: without that thread no lease would end
            return self._gateway

    def location(self) -> str:
        """Return the address of Arrow Flight on a local socket, started on first use."""
        use_grpc()
        from penstock.server.flight import FlightGateway

        gateway = self.gateway()
        with self._lock:
            if not self._location:
                location = f"grpc+unix://{self._folder}/f-{self._random.randbytes(8).hex()}"
                self._servers.append(FlightGateway(gateway, location, random=self._random))
                self._location = location
            return self._location

    def listen(self, host: str, port: int, tls: ssl.SSLContext, rights_of: Callable[[str], Rights | None]) -> int:
        """Serve over TCP too; return the port."""
        use_grpc()
        from penstock.server.flight import FlightGateway
        from penstock.server.guard import Guard

        gateway, backend = self.gateway(), f"{self._folder}/f-{self._random.randbytes(8).hex()}"
        server = FlightGateway(gateway, f"grpc+unix://{backend}", random=self._random, rights_of=rights_of)
        with self._lock:
            self._servers.append(server)
        guard = Guard(backend, host, port, tls)
        with self._lock:
            self._guards.append(guard)
        return guard.port

    def _maintain(self) -> None:
        while not self._ended.wait(MAINTAIN_S):
            try:
                self.gateway().maintain()
            except (OSError, PenstockError) as error:  # of one object: the leases of the others must end, too
                logger.warning("%s: what a client left is released later (%s)", self._path, error)

    def _disable_after_fork(self) -> None:
        """In a forked child: give up the sockets, so that clients of the parent fail when the parent ends."""
        for server in self._servers:
            abandon(server)
        if self._gateway is not None:  # also if another thread was just starting its server
            detach_sockets(self._is_ours)

    def _is_ours(self, address: object) -> bool:
        if isinstance(address, tuple):
            return address[1] in [guard.port for guard in self._guards]
        return isinstance(address, str) and address.startswith(f"{self._folder}/")

    def close(self) -> None:
        """Refuse all requests and stop serving. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._control.close()
        with self._lock:
            gateway, servers, guards = self._gateway, self._servers, self._guards
        if gateway is not None:
            gateway.close()
        for guard in guards:
            guard.close()
        ending: list[threading.Thread] = []
        for server in servers:
            try:
                ending.append(threads.spawn(server.shutdown, name="penstock-flight-end"))
            except ProcessLimit:
                server.shutdown()
        for thread in ending:
            thread.join(SHUTDOWN_S)  # a suspended client holds its call until the call's deadline
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        with suppress(Closed):  # the folder was replaced, and its sockets belong to its new owner
            self._store.check_folder()
            locator.remove_sockets(self._path)
