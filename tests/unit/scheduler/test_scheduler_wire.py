"""Messages between an engine and its workers: whatever bytes come, a message or an error, and no hang."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.scheduler.wire import LENGTH, Channel, Done, EngineCall, Failed, Message, Ready, Stop, shorten

MESSAGES: list[Message] = [
    Ready(),
    EngineCall("a.b:c", b"\0\xff" * 50),
    Stop(),
    Done(b""),
    Failed("OSError", "no luck", "Traceback", True, False),
]


@contextmanager
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_messages_arrive_as_sent_however_the_bytes_are_cut() -> None:
    with pair() as (sender, wire), pair() as (receiver, feed):
        for message in MESSAGES:
            sender.send(message, 10.0)
        sent = wire.recv(1 << 20)
        messages: list[Message] = []
        for byte in sent:
            feed.sendall(bytes([byte]))
            message_or_none = receiver.receive(0.0001)
            if message_or_none is not None:
                messages.append(message_or_none)
        assert messages == MESSAGES


def test_a_closed_connection_is_an_error_and_a_silent_one_is_not() -> None:
    with pair() as (channel, wire):
        assert channel.receive(0.0001) is None
        wire.sendall(LENGTH.pack(100) + b"half")
        assert channel.receive(0.0001) is None
        wire.close()
        with pytest.raises(ConnectionError):
            channel.receive(0.0001)
        with pytest.raises(OSError):
            channel.send(Ready(), 1.0)


def test_a_message_that_nobody_takes_is_an_error() -> None:
    with pair() as (channel, _), pytest.raises(TimeoutError):
        channel.send(Done(bytes(32 << 20)), 0.05)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_an_error_or_nothing(data: bytes) -> None:
    with pair() as (channel, wire):
        wire.sendall(data)
        with suppress(ConnectionError):
            while channel.receive(0.0001) is not None:
                pass


@given(st.binary(max_size=60))
@example(b"\x93\xa4call\xa1\xff\xc4\x00")  # a name that is not UTF-8
def test_any_framed_bytes_are_a_message_or_an_error(body: bytes) -> None:
    with pair() as (channel, wire):
        wire.sendall(LENGTH.pack(len(body)) + body)
        with suppress(ConnectionError):
            assert isinstance(channel.receive(10.0), Message)


def test_a_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    with pair() as (channel, wire):
        wire.sendall(LENGTH.pack(0xFFFFFFFF))
        with pytest.raises(ConnectionError, match="4294967295 bytes"):
            channel.receive(10.0)


def test_long_texts_are_cut() -> None:
    assert shorten("short") == "short"
    assert len(shorten("x" * 1_000_000)) < 101_000
