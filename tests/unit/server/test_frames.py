"""What passes the guard, frame by frame: lengths, numbers and times, for strangers and for clients."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest

from penstock.protocol import wire
from penstock.server import callers as callers_module
from penstock.server import frames
from penstock.server.callers import Caller, Callers, RefusedError
from penstock.server.frames import PREFACE, Inspector

ANSWER = 1  # the stream of the first request, whose answer makes a stranger a client


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(body: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    return struct.pack(">BI", compressed, len(body) if length is None else length) + body


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """A connection and all others."""

    def __init__(self, callers: Callers | None = None, *, client: bool = False) -> None:
        self.time = Time()
        self.disconnects: list[str] = []
        self.callers = Callers() if callers is None else callers
        self.caller = Caller("10.0.0.1", lambda _: self.disconnects.append("here"))
        self.callers.enter(self.caller)
        self.inspector = Inspector(self.caller, self.callers, self.time)
        if client:
            self.inspector.from_client(PREFACE + frame(1, 5, ANSWER))
            self.inspector.from_server(frame(1, 4, ANSWER) + frame(0, 0, ANSWER, b"x") + frame(1, 5, ANSWER))


@pytest.mark.parametrize("step", [1, 3, 10, 1 << 20])
def test_frames_are_followed_however_they_are_cut(step: int) -> None:
    line = Line()
    sent = PREFACE + frame(4, 0, 0, bytes(6)) + frame(1, 4, 1, b"headers") + frame(6, 0, 0, bytes(8))
    whole = message(b"x" * 100) + message(b"") + message(b"y" * 50)
    sent += frame(0, 0, 1, whole[:3]) + frame(0, 8, 1, b"\x04" + whole[3:60] + bytes(4)) + frame(0, 1, 1, whole[60:])
    for at in range(0, len(sent), step):
        line.inspector.from_client(sent[at : at + step])
    assert (line.caller.bytes, line.caller.requests, line.caller.is_client) == (len(whole), 1, False)
    answer = frame(4, 0, 0) + frame(1, 4, 1, b"headers") + frame(0, 0, 1, b"body") + frame(1, 5, 1, b"trailers")
    for at in range(0, len(answer), step):
        line.inspector.from_server(answer[at : at + step])
    assert (line.caller.bytes, line.caller.requests, line.caller.is_client) == (0, 0, True)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not HTTP/2"),
        (
            PREFACE + frame(1, 4, 1) + frame(0, 0, 1, message(b"", length=wire.MESSAGE_BYTES_MAX + (1 << 20))),
            "a message of",
        ),
        (
            PREFACE + frame(1, 4, 1) + frame(0, 0, 1, message(b"", length=wire.MESSAGE_BYTES_MAX)[:5] * 2),
            "not reached: the second header is data of the first",
        ),
        (PREFACE + frame(1, 4, 1) + frame(0, 0, 1, message(b"bomb", compressed=1)), "compressed"),
        (PREFACE + frame(1, 4, 1) + frame(0, 8, 1, b"\xff" + bytes(5)), "padding"),
        (PREFACE + b"".join(frame(1, 4, 2 * n + 1) for n in range(frames.STRANGER_STREAMS_MAX + 1)), "at once"),
        (
            PREFACE
            + b"".join(
                frame(1, 4, 2 * n + 1) + frame(3, 0, 2 * n + 1, bytes(4))
                for n in range(frames.STRANGER_STREAMS_TOTAL_MAX + 1)
            ),
            "without a token",
        ),
        (PREFACE + frame(1, 0, 1, bytes(20 << 10)) + frame(9, 0, 1, bytes(20 << 10)), "headers"),
        (PREFACE + frame(4, 0, 0, bytes(frames.CONTROL_BYTES_MAX + 1)), "kind 4"),
        (PREFACE + b"\xff\xff\xff\x1f" + bytes(5), "kind 31"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stranger_who_breaks_a_limit_is_refused(sent: bytes, reason: str) -> None:
    line = Line()
    if reason.startswith("not reached"):
        line.inspector.from_client(sent)
    else:
        with pytest.raises(RefusedError, match=reason):
            line.inspector.from_client(sent)
    line.callers.leave(line.caller)
    assert line.callers.bytes(clients=False) == 0


def test_a_client_may_do_more_than_a_stranger_and_has_limits_too() -> None:
    line = Line(client=True)
    for n in range(frames.STREAMS_MAX):
        line.inspector.from_client(frame(1, 4, 2 * n + 3))
    with pytest.raises(RefusedError, match="at once"):
        line.inspector.from_client(frame(1, 4, 2 * frames.STREAMS_MAX + 3))
    line = Line(client=True)
    taken_back = [frame(1, 4, 2 * n + 3) + frame(3, 0, 2 * n + 3, bytes(4)) for n in range(frames.RESETS_MAX + 1)]
    for each in taken_back[:-1]:
        line.inspector.from_client(each)
    with pytest.raises(RefusedError, match="are cancelled"):
        line.inspector.from_client(taken_back[-1])
    line = Line(client=True)
    for each in taken_back:
        line.inspector.from_client(each)
        line.inspector.check_times()  # over a longer time it may


def test_a_refusal_makes_no_client() -> None:
    line = Line()
    line.inspector.from_client(PREFACE + frame(1, 5, 1))
    line.inspector.from_server(frame(4, 0, 0) + frame(6, 0, 0, bytes(8)) + frame(0, 0, 1) + frame(1, 5, 1, b"status"))
    assert not line.caller.is_client
    line.callers.expire(line.caller)
    assert line.disconnects == ["here"]
    line = Line(client=True)
    line.callers.expire(line.caller)
    assert line.disconnects == []


def test_bytes_under_way_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only declared takes nobody's room; at the limit the one who has the most goes."""
    monkeypatch.setattr(callers_module, "CLIENTS_BYTES_MAX", 1_000)
    monkeypatch.setattr(callers_module, "STRANGERS_BYTES_MAX", 100)
    callers = Callers()
    stranger, greedy, modest = Line(callers), Line(callers, client=True), Line(callers, client=True)
    declared = message(b"", length=wire.MESSAGE_BYTES_MAX)
    stranger.inspector.from_client(PREFACE + frame(1, 4, 1) + frame(0, 0, 1, declared))
    for line, sent in ((greedy, 700), (modest, 250)):
        line.inspector.from_client(frame(1, 4, 3) + frame(0, 0, 3, declared + bytes(sent)))
    modest.inspector.from_client(frame(0, 0, 3, bytes(100)))
    assert (greedy.disconnects, modest.disconnects, stranger.disconnects) == (["here"], [], [])
    callers.leave(greedy.caller)
    assert callers.bytes(clients=True) == modest.caller.bytes == 355
    with pytest.raises(RefusedError, match="bytes under way"):
        stranger.inspector.from_client(frame(0, 0, 1, bytes(200)))
    modest.inspector.from_client(frame(3, 0, 3, bytes(4)))
    assert callers.bytes(clients=True) == 0


def test_what_takes_too_long_is_refused() -> None:
    line = Line(client=True)
    line.inspector.from_client(frame(1, 4, 3) + frame(0, 1, 3, message(b"x")))
    line.time.now_s = frames.STREAM_S_MAX - 1
    line.inspector.check_times()
    line.inspector.from_client(frame(6, 0, 0, bytes(8)))  # a ping is no sign of life
    line.time.now_s = frames.STREAM_S_MAX + 1
    with pytest.raises(RefusedError, match="takes too long"):
        line.inspector.check_times()
    line.inspector.from_server(frame(3, 0, 3, bytes(4)))
    line.inspector.check_times()
    line.time.now_s += frames.IDLE_S_MAX + 1
    with pytest.raises(RefusedError, match="the connection is idle"):
        line.inspector.check_times()


def test_half_a_request_is_not_waited_for_long() -> None:
    line = Line(client=True)
    line.inspector.from_client(frame(1, 4, 3) + frame(0, 0, 3, message(b"", length=1_000)))
    line.time.now_s = frames.PROGRESS_S_MAX - 1
    line.inspector.from_client(frame(0, 0, 3, bytes(10)))
    line.time.now_s += frames.PROGRESS_S_MAX - 1
    line.inspector.check_times()  # some of it came
    line.inspector.from_client(frame(6, 0, 0, bytes(8)))
    line.time.now_s += 2
    with pytest.raises(RefusedError, match="did not arrive"):
        line.inspector.check_times()


def test_damaged_frames_break_nothing() -> None:
    draw = random.Random(3)
    good = PREFACE + frame(4, 0, 0, bytes(6)) + frame(1, 4, 1, b"h") + frame(0, 1, 1, message(b"x" * 50))
    for _ in range(2_000):
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        line = Line()
        with suppress(RefusedError):
            line.inspector.from_client(bytes(bad))
        line.callers.leave(line.caller)
        assert line.callers.bytes(clients=False) == 0
