"""Decoders, which threads share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from penstock.host import decoders


def test_decoders_are_made_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec crashes where one thread uses a dataclass whose fields another one is still collecting."""
    making, most = list[int](), list[int]()
    decoder = msgspec.msgpack.Decoder

    def make(kind: Any) -> Any:
        making.append(1)
        most.append(len(making))
        time.sleep(0.05)
        making.pop()
        return decoder(kind)

    monkeypatch.setattr(decoders, "_decoders", {})
    monkeypatch.setattr(msgspec.msgpack, "Decoder", make)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: decoders.decoder_of(list[int]).decode(b"\x91\x01"), range(4))) == [[1]] * 4
    assert most == [1]
