"""The control socket of an owner, on which clients ask for Arrow Flight, or for the owner to yield.

Arrow Flight takes a tenth of a second and some megabytes to start. A store that is used in one process never pays that:
the first question of a client starts it.

Thread: one, which answers one question after another; `close` from any other.
Invariant: the sockets exist while the store's lock is held, and no other process removes them.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable

from penstock.host import threads
from penstock.host.waiting import pause
from penstock.protocol import locator

logger = logging.getLogger(__name__)

QUESTION_S = 2.0  # within which a connected client must send its question


class ControlSocket:
    """Listens on the control socket and answers questions."""

    def __init__(self, folder: str, answer: Callable[[locator.Question], locator.Answer]) -> None:
        self._answer = answer
        with threads.without_forks():
            self._listener = locator.listen(folder)
            self._ended, self._end = socket.socketpair()
            threads.after_fork(self, ControlSocket._close_sockets)
        try:
            self._thread = threads.spawn(self._run, name="penstock-control")
        except BaseException:
            self._close_sockets()
            raise

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, self._ended):
                selector.register(each, selectors.EVENT_READ)
            while self._ended not in [key.fileobj for key, _ in selector.select()]:
                self._answer_one()

    def _answer_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or the client closed the connection
            logger.warning("a client could not be accepted at the control socket: %s", error)
            pause(0.1)
            return
        with connection:
            connection.settimeout(QUESTION_S)
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        question = locator.read_question(connection)
        if question is None:
            return
        try:
            answer = self._answer(question)
        except Exception as error:
            logger.exception("a question at the control socket failed")
            answer = locator.Answer(reason=f"the owner failed to answer ({error})")
        try:
            locator.send_line(connection, answer)
        except OSError:
            logger.debug("the client did not wait for its answer")

    def _close_sockets(self) -> None:
        """Close the sockets; also in a forked child, so that no client waits for it after the owner ended."""
        self._listener.close()
        self._ended.close()
        self._end.close()

    def close(self) -> None:
        """Stop answering, and close the sockets."""
        self._end.send(b"x")
        self._thread.join(10.0)
        with threads.without_forks():  # a child forked during a close would keep the socket open
            self._close_sockets()
