"""A writer that never waits fills flushes; while somebody waits for them they are kept small."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import penstock
from penstock.coordinator import Epoch
from penstock.coordinator.layers import FAIR_BYTES, FAIR_FLUSHES, DeltaBuffer
from penstock.partition.pending import PendingDelta
from penstock.store.flusher import StoreFlusher

FLUSH_BYTES, BYTES_MAX = 4 << 20, 64 << 20


def make_buffer() -> DeltaBuffer[PendingDelta, int]:
    return DeltaBuffer(PendingDelta, 0, Epoch(0), flush_bytes=FLUSH_BYTES, bytes_max=BYTES_MAX)


def test_the_room_is_small_while_somebody_waits() -> None:
    buffer = make_buffer()
    buffer.open_room()
    assert buffer.room == FLUSH_BYTES
    buffer.fair_flushes = 1
    buffer.open_room()
    assert buffer.room == FAIR_BYTES
    assert buffer.fits(BYTES_MAX)  # a large write is one flush, if nothing else is
    buffer.charge(FAIR_BYTES - 10)
    assert buffer.fits(10)
    assert not buffer.fits(11)
    assert buffer.fits(11, fair=False)  # a write that cannot wait
    assert not buffer.fits(BYTES_MAX, fair=False)
    buffer.take(Epoch(1))
    buffer.open_room()
    assert buffer.room == FLUSH_BYTES


def batch_sizes(path: Path, monkeypatch: Any) -> list[int]:
    """The sizes of flushes while one thread puts durably, and another puts a few MB without waiting."""
    sizes, make_durable = list[int](), StoreFlusher.make_durable

    def watched(self: StoreFlusher, batch: Any, *, again: bool) -> Any:
        sizes.append(batch.size)
        return make_durable(self, batch, again=again)

    with penstock.open(path, settings=penstock.StoreSettings(serve=False)) as store:
        waiting, other, done = store.kv("waiting"), store.kv("other"), threading.Event()
        waiting.put(b"k", b"", durable=True)
        monkeypatch.setattr(StoreFlusher, "make_durable", watched)

        def put_durably() -> None:
            while not done.is_set():
                waiting.put(b"k", b"", durable=True)

        thread = threading.Thread(target=put_durably)
        thread.start()
        try:
            for number in range(30_000):
                other.put(b"%d" % number, bytes(100))
        finally:
            done.set()
            thread.join(30)
        store.flush()
        assert len(list(other.scan())) == 30_000
    return sizes


def test_no_flush_that_others_wait_for_is_large(tmp_path: Path, monkeypatch: Any) -> None:
    sizes = batch_sizes(tmp_path / "store", monkeypatch)
    assert max(sizes[:-2]) <= FAIR_BYTES + 1_000  # the last come when nobody waits any more
    assert FAIR_FLUSHES > 1
