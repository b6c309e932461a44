"""A real Prometheus on loopback, for the PromQL benchmark and the conformance tests, and its remote-write messages.

It is looked for in the folder PENSTOCK_PEERS and on PATH. Nothing in the package needs it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0


def peer_binary(name: str = "prometheus") -> str | None:
    """Return the path of a program of Prometheus; None where there is none."""
    folder = os.environ.get("PENSTOCK_PEERS")
    path = shutil.which(name, path=f"{folder}:{folder}/usr/bin") if folder else None
    return path or shutil.which(name)


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """Run a server that answers `/-/ready` on a port; it is ready within, and ended after."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} does not start"
                assert time.monotonic() < until, f"{command[0]} does not start in time"
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def prometheus(folder: Path, *options: str) -> Iterator[int]:
    """Run a Prometheus that takes remote writes and scrapes nothing; its port."""
    binary, port = peer_binary(), free_port()
    assert binary is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text("global: {}\n")
    command = [
        *(binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver", "--log.level=error"),
        *("--storage.tsdb.retention.time=100y", *options),
    ]
    with serving(command, port):
        yield port


# -- messages of remote write


def varint(number: int) -> bytes:
    """Encode a number as protobuf does."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def field(number: int, data: bytes) -> bytes:
    """Encode a field of bytes as protobuf does."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def label_fields(labels: dict[str, str]) -> bytes:
    """Encode the labels of a series."""
    return b"".join(field(1, field(1, k.encode()) + field(2, v.encode())) for k, v in sorted(labels.items()))
