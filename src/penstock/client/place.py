"""Where an owner of a store is reached from this machine: its sockets, and the lock of those who come and go.

    <store>/run/            mode 0700: who may not read the store may not knock
    <store>/run/bell        the owner's bell: a question in a line of JSON, an answer in another
    <store>/run/f-<hex>     Arrow Flight, once somebody asked for it: another name for each opening, because gRPC
                            remembers for a while that a name led nowhere
    <store>/run/elsewhere   instead of these two, where a socket cannot be there: the folder that has them
    <store>/OPENING         held while somebody opens the store, starts an owner or makes one yield

Thread: any.
Invariant: who holds OPENING and hears nobody at the bell knows that no owner comes up unless they start it.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import threading
from contextlib import suppress
from typing import Literal

import msgspec

from penstock.errors import Invalid, StoreLocked, WaitExpired
from penstock.host.clock import Clock
from penstock.host.files import FileSystem, Lock

SOCKET_PATH_BYTES_MAX = 100  # of 104 to 108, by system
LINE_BYTES_MAX = 64 << 10
PAUSE_S = 0.02  # between two looks
_FLIGHT = re.compile("f-[0-9a-f]{16}")

Asked = Literal["serve", "yield"]


class Question(msgspec.Struct, frozen=True):
    """What is asked at the bell."""

    ask: Asked


class Answer(msgspec.Struct, frozen=True):
    """What the owner says."""

    location: str = ""  # of Arrow Flight, when asked to serve
    yields: bool = False  # it is about to let go of the store
    detached: bool = False  # it was started by a client, and yields when it is free
    reason: str = ""  # why not


_questions = msgspec.json.Decoder(Question)
_answers = msgspec.json.Decoder(Answer)


def has_store(path: str) -> bool:
    """Whether there is a store in a folder."""
    return os.path.exists(f"{path}/STORE")


# -- sockets


def make_sockets_folder(path: str, *, elsewhere: bool = False) -> str:
    """The private folder for an owner's sockets, empty. Requires: the store's lock."""
    run = f"{path}/run"
    with suppress(FileExistsError):
        os.mkdir(run, 0o700)
    if not stat.S_ISDIR(os.lstat(run).st_mode):
        raise Invalid(f"{run} is in the place of a folder of the store: move it elsewhere")
    os.chmod(run, 0o700)
    _clear(run)
    if not elsewhere and len(os.fsencode(f"{run}/f-0123456789abcdef")) <= SOCKET_PATH_BYTES_MAX:
        return run
    folder = tempfile.mkdtemp(prefix="penstock-")
    with open(f"{run}/elsewhere.tmp", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(folder)
    os.rename(f"{run}/elsewhere.tmp", f"{run}/elsewhere")
    return folder


def remove_sockets(path: str) -> None:
    """Leave nothing that leads nowhere. Requires: the store's lock."""
    with suppress(OSError):
        _clear(f"{path}/run")


def _clear(run: str) -> None:
    elsewhere = _elsewhere(run)
    for folder in [run] if elsewhere is None else [elsewhere, run]:
        with suppress(FileNotFoundError):
            for name in os.listdir(folder):
                if name in ("bell", "elsewhere", "elsewhere.tmp") or _FLIGHT.fullmatch(name):
                    with suppress(IsADirectoryError, PermissionError):  # not ours: the sockets go elsewhere
                        os.unlink(f"{folder}/{name}")
    if elsewhere is not None:
        with suppress(OSError):
            os.rmdir(elsewhere)


def _elsewhere(run: str) -> str | None:
    try:
        with open(f"{run}/elsewhere", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, IsADirectoryError):
        return None


def listen(folder: str) -> socket.socket:
    """The bell's socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"{folder}/bell")
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


# -- the bell


def knock(path: str, ask: Asked, timeout_s: float) -> Answer | None:
    """Ask the owner; None if nobody is there."""
    run = f"{path}/run"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"{_elsewhere(run) or run}/bell")
            send_line(connection, Question(ask))
            line = read_line(connection)
        except PermissionError:
            raise StoreLocked(f"{run} belongs to another user: ask its owner to serve it over TCP") from None
        except TimeoutError:
            raise WaitExpired(f"the owner of {path} did not answer within {timeout_s} s: try again") from None
        except OSError:  # no socket, nobody behind it, or its owner died over the question
            return None
    return _answers.decode(line) if line else None


def read_question(connection: socket.socket) -> Question | None:
    """What somebody asks; None if they went away or do not speak as we do."""
    try:
        return _questions.decode(read_line(connection))
    except (OSError, msgspec.DecodeError):
        return None


def send_line(connection: socket.socket, message: Question | Answer) -> None:
    """One message."""
    connection.sendall(msgspec.json.encode(message) + b"\n")


def read_line(connection: socket.socket) -> bytes:
    """One message; nothing if the other side went away."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(line) > LINE_BYTES_MAX:
            return b""
        line += part
    return line


# -- coming and going


def hold_opening(fs: FileSystem, path: str, clock: Clock, deadline_s: float) -> Lock:
    """The lock of those who open, start and make yield; `StoreLocked` if others keep it past the deadline."""
    while True:
        try:
            return fs.lock(f"{path}/OPENING")
        except StoreLocked:
            if clock.monotonic_s() >= deadline_s:
                raise StoreLocked(f"{path} is being opened by another process: try again") from None
        pause()


def pause(seconds: float = PAUSE_S) -> None:
    """Let others go on."""
    threading.Event().wait(seconds)
