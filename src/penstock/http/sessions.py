"""Sessions of browsers: a token is given once, and a cookie that scripts cannot read stands for it.

A page's event stream cannot send a bearer token, and a token in an address would be written to logs. The cookie is sent
by pages of this origin only (`SameSite=Strict`), and its name has the port: two consoles on a machine do not share it.

Thread: the event loop.
Invariants: (1) a session has the rights of its token and ends by itself. (2) there are at most SESSIONS_MAX: a new one
ends the oldest.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from penstock.host.clock import Clock
from penstock.host.randomness import Random
from penstock.server.rights import Rights

SESSION_S = 12 * 3600.0
SESSIONS_MAX = 256


class Sessions:
    """The sessions of one server. `rights_of` returns those of a token, which may have been withdrawn."""

    def __init__(self, rights_of: Callable[[str], Rights | None] | None, clock: Clock, random: Random) -> None:
        self._rights_of = rights_of
        self._clock = clock
        self._random = random
        self._tokens: dict[str, tuple[str, float]] = {}  # by session: its token, and when it ends

    def begin(self, request: Request, response: Response, token: str) -> bool:
        """Begin a session and set its cookie; False if the token is unknown."""
        if self._rights_of is None or self._rights_of(token) is None:
            return False
        while len(self._tokens) >= SESSIONS_MAX:
            self._tokens.pop(next(iter(self._tokens)))
        name = self._random.randbytes(24).hex()
        self._tokens[name] = (token, self._clock.monotonic_s() + SESSION_S)
        response.set_cookie(
            _cookie(request), name, max_age=int(SESSION_S), path="/", httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return True

    def end(self, request: Request, response: Response) -> None:
        """End the session of a request."""
        self._tokens.pop(request.cookies.get(_cookie(request), ""), None)
        response.delete_cookie(_cookie(request), path="/", httponly=True, samesite="strict")

    def rights(self, request: Request) -> Rights | None:
        """Return the rights of a request's session; None if it has none, or it has ended."""
        name = request.cookies.get(_cookie(request), "")
        token, until_s = self._tokens.get(name, ("", 0.0))
        if not token or self._rights_of is None:
            return None
        if self._clock.monotonic_s() > until_s:
            del self._tokens[name]
            return None
        return self._rights_of(token)


def _cookie(request: Request) -> str:
    return f"penstock-{request.url.port or request.url.scheme}"
