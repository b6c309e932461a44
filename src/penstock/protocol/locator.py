"""How processes on this machine find the owner of a store: its sockets, and the lock for opening and starting.

    <store>/run/            mode 0700: only users who may read the store can connect
    <store>/run/control     the owner's control socket: a question in a line of JSON, an answer in another
    <store>/run/f-<hex>     Arrow Flight, once a client asked for it; a new name for each opening, because gRPC
                            backs off for a while from a name that failed
    <store>/run/elsewhere   where sockets cannot be in this folder: the path of the folder that has them
    <store>/OPENING         held by a process that opens the store, starts an owner or makes one yield

OPENING only keeps processes from starting owners in vain; LOCK keeps a store from having two. An owner whose starter
timed out opens without OPENING, and ends if another process has LOCK by then.

Thread: any.
Invariants: (1) a socket's name is short and has no character that is special in a URI: gRPC takes names as URIs.
(2) no wait exceeds the caller's timeout.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec

from penstock.errors import CorruptionError, Invalid, StoreLocked, WaitExpired
from penstock.host.clock import Clock, SystemClock
from penstock.host.files import FileSystem, Lock
from penstock.host.waiting import Retries

SOCKET_PATH_BYTES_MAX = 100  # of 104 to 108, by system
_PLAIN = re.compile(rb"[A-Za-z0-9/._~-]+")  # needs no escape in a URI
LINE_BYTES_MAX = 64 << 10
_FLIGHT = re.compile("f-[0-9a-f]{16}")
CONTROL = "control"  # the control socket; earlier versions named it bell
ANSWER_S_MIN = 0.1  # for an answer, even if the deadline has passed
ANSWER_S_MAX = 3600.0

Request = Literal["serve", "yield"]


class Question(msgspec.Struct, frozen=True):
    """A question to the owner, at its control socket."""

    ask: Request


class Answer(msgspec.Struct, frozen=True):
    """The owner's answer to a question."""

    location: str = ""  # of Arrow Flight, when asked to serve
    yields: bool = False  # it is about to release the store
    detached: bool = False  # a client started it, and it yields when no client needs it
    reason: str = ""  # why not


_questions = msgspec.json.Decoder(Question)
_answers = msgspec.json.Decoder(Answer)


def has_store(path: str) -> bool:
    """Whether there is a store in a folder; `CorruptionError` if it lost its identity, which is written first."""
    if os.path.exists(f"{path}/STORE"):
        return True
    if os.path.isfile(f"{path}/manifest") and os.path.isdir(f"{path}/journal"):
        raise CorruptionError(f"{path}/STORE", 0, "the store's identity is missing, although it has a manifest")
    return False


# -- sockets


def make_sockets_folder(path: str, *, elsewhere: bool = False) -> str:
    """Make the private folder for an owner's sockets, empty. Requires: the store's lock."""
    run = f"{path}/run"
    with suppress(FileExistsError):
        os.mkdir(run, 0o700)
    if not stat.S_ISDIR(os.lstat(run).st_mode):
        raise Invalid(f"{run} is in the place of a folder of the store: move it elsewhere")
    os.chmod(run, 0o700)
    _clear(run)
    if not elsewhere and _takes_sockets(run):
        return run
    folder = _make_elsewhere()
    with open(f"{run}/elsewhere.tmp", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(folder)
    try:
        os.rename(f"{run}/elsewhere.tmp", f"{run}/elsewhere")
    except IsADirectoryError:
        os.rmdir(folder)
        raise Invalid(f"{run}/elsewhere is a folder in the place of a file of the store: move it elsewhere") from None
    return folder


def _takes_sockets(folder: str) -> bool:
    name = os.fsencode(f"{folder}/f-0123456789abcdef")
    return len(name) <= SOCKET_PATH_BYTES_MAX and _PLAIN.fullmatch(name) is not None


def _make_elsewhere() -> str:
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if _takes_sockets(f"{os.path.realpath(parent)}/penstock-01234567"):
            return tempfile.mkdtemp(prefix="penstock-", dir=os.path.realpath(parent))
    raise Invalid("no folder for temporary files has a short and plain name: set TMPDIR to one")


def remove_sockets(path: str) -> None:
    """Remove the owner's sockets, and their folder if it is elsewhere. Requires: the store's lock."""
    with suppress(OSError):
        _clear(f"{path}/run")


def _clear(run: str) -> None:
    elsewhere = _elsewhere(run)
    for folder in [run] if elsewhere is None else [elsewhere, run]:
        with suppress(FileNotFoundError):
            for name in os.listdir(folder):
                if name in (CONTROL, "bell", "elsewhere", "elsewhere.tmp") or _FLIGHT.fullmatch(name):
                    with suppress(IsADirectoryError, PermissionError):  # not ours: the sockets go elsewhere
                        os.unlink(f"{folder}/{name}")
    if elsewhere is not None:
        with suppress(OSError):
            os.rmdir(elsewhere)


def _elsewhere(run: str) -> str | None:
    """Return the folder that `run` points to; None if there is none, or if another user created it since."""
    try:
        with open(f"{run}/elsewhere", encoding="utf-8", errors="surrogateescape") as file:
            folder = file.read()
        status = os.lstat(folder)
        ours = status.st_uid in (0, os.getuid(), os.lstat(run).st_uid)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return folder if ours and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077 else None


def listen(folder: str) -> socket.socket:
    """Return the control socket, listening."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"{folder}/{CONTROL}")
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


# -- the control socket


def ask_owner(path: str, ask: Request, timeout_s: float) -> Answer | None:
    """Ask the owner; None if there is none, `WaitExpired` if it does not answer."""
    run, clock = f"{path}/run", SystemClock()
    deadline_s = clock.monotonic_s() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _limit(connection, clock, deadline_s)
            connection.connect(f"{_elsewhere(run) or run}/{CONTROL}")
            send_line(connection, Question(ask))
            line = read_line(connection, lambda: _limit(connection, clock, deadline_s))
        except PermissionError:
            raise StoreLocked(f"{run} belongs to another user: ask its owner to serve it over TCP") from None
        except (TimeoutError, BlockingIOError):
            raise WaitExpired(f"the owner of {path} does not answer (is it stopped?): try again") from None
        except OSError:  # no socket, no listener, or the owner died meanwhile
            return None
    return _answers.decode(line) if line else None


def _limit(connection: socket.socket, clock: Clock, deadline_s: float) -> None:
    connection.settimeout(min(max(deadline_s - clock.monotonic_s(), ANSWER_S_MIN), ANSWER_S_MAX))


def read_question(connection: socket.socket) -> Question | None:
    """Return the client's question; None if it disconnected or the question does not decode."""
    try:
        return _questions.decode(read_line(connection))
    except (OSError, msgspec.DecodeError):
        return None


def send_line(connection: socket.socket, message: Question | Answer) -> None:
    """Send one message; `OSError` if the other side is gone, also in a program that SIGPIPE would end."""
    connection.sendall(msgspec.json.encode(message) + b"\n", getattr(socket, "MSG_NOSIGNAL", 0))


def read_line(connection: socket.socket, limit: Callable[[], None] = lambda: None) -> bytes:
    """Read one message; empty if the other side disconnected. `limit` is called before each wait."""
    line = b""
    while not line.endswith(b"\n"):
        limit()
        part = connection.recv(4096)
        if not part or len(line) > LINE_BYTES_MAX:
            return b""
        line += part
    return line


# -- opening


def hold_opening(fs: FileSystem, path: str, clock: Clock, deadline_s: float) -> Lock:
    """Take the OPENING lock; `StoreLocked` if another process holds it past the deadline."""
    retries = Retries(clock, deadline_s)
    while True:
        try:
            return fs.lock(f"{path}/OPENING")
        except StoreLocked:
            if not retries.again():
                raise StoreLocked(f"{path} is being opened by another process: try again") from None
