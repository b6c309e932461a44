"""The log beside bare system calls: what framing, checksums and segments cost."""

from __future__ import annotations

import os
import random
import sys
import time

from bench.harness import Case, Goal, folder, rate, run, sized
from penstock.host.os_files import OsFileSystem
from penstock.log import Log, LogSettings

LARGE = [random.Random(1).randbytes(100 << 10)] * 1
SMALL = [random.Random(i).randbytes(100) for i in range(1000)]
SEGMENTS = sized(10_000, 1_000)


def open_log(path: str, **sizes: int) -> Log:
    return Log.open(OsFileSystem(), f"{path}/log", random=random.Random(1), settings=LogSettings(**sizes))


def append_ours(batch: list[bytes], times: int) -> float:
    with folder() as path, open_log(path) as log:

        def work() -> None:
            for _ in range(times):
                log.append(batch)
                log.sync()

        return rate(times * len(batch), work)


def append_bare(batch: list[bytes], times: int) -> float:
    with folder() as path:
        fd = os.open(f"{path}/bare", os.O_CREAT | os.O_WRONLY)
        data = b"".join(batch)

        def work() -> None:
            at = 0
            for _ in range(times):
                os.pwrite(fd, data, at)
                os.fdatasync(fd)
                at += len(data)

        result = rate(times * len(batch), work)
        os.close(fd)
        return result


def single_ours() -> float:
    return append_ours(SMALL[:1], 2_000)


def single_bare() -> float:
    return append_bare(SMALL[:1], 2_000)


def open_many() -> float:
    """Milliseconds to open a log with 10,000 sealed segments, as a rate of opens a second."""
    with folder() as path:
        log = open_log(path, segment_bytes=256, allocate_bytes=256, index_bytes=256)
        with log:
            for _ in range(SEGMENTS):
                log.append([b"x" * 150])
        # Ten thousand fsyncs have just been paid for; let the disk come to rest.
        time.sleep(0.2)
        result = rate(1, lambda: open_log(path))
        print(f"    opening {SEGMENTS} segments: {1000 / result:.1f} ms")
        return result


def scan() -> float:
    """Bytes a second of recovery after an unclean end: a whole segment of 100-byte records is read and checked."""
    with folder() as path:
        log = open_log(path)
        size = 0
        while size < 48 << 20:
            log.append(SMALL)
            size += 136 * len(SMALL)
        log.sync()
        log.append(SMALL)
        result = rate(size, lambda: open_log(path))
        print(f"    recovery scan: {result / 1e6:.0f} MB/s")
        return result / 1e6


def main() -> bool:
    return run(
        "log",
        [
            Case(name="append 100 KB, synced each", run=lambda: append_ours(LARGE, 400)),
            Case(
                name="pwrite + fdatasync 100 KB",
                run=lambda: append_bare(LARGE, 400),
                peer_of="append 100 KB, synced each",
            ),
            Case(name="append 1,000 x 100 B, synced each batch", run=lambda: append_ours(SMALL, 200)),
            Case(
                name="pwrite + fdatasync of 100 KB unframed",
                run=lambda: append_bare(SMALL, 200),
                peer_of="append 1,000 x 100 B, synced each batch",
            ),
            Case(name="append 100 B, synced each", run=single_ours),
            Case(name="pwrite + fdatasync 100 B", run=single_bare, peer_of="append 100 B, synced each"),
            Case(name="open 10,000 sealed segments", run=open_many, unit="opens/s"),
            Case(name="recovery scan", run=scan, unit="MB/s"),
        ],
        [Goal(ours="append 100 KB, synced each", ratio=0.85, gate=True)],
    )


if __name__ == "__main__":
    sys.exit(not main())
