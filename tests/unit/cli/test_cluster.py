"""`penstock cluster`, as the guide has it: the files, three members in processes, a client, who leads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

COMMAND = [sys.executable, "-m", "penstock", "cluster"]


def _penstock(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )


def _two_free_ports() -> int:
    for port in range(21_000 + os.getpid() % 20_000, 60_000, 2):
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("there are no free ports")


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate(timeout=60)


def test_three_members_in_five_commands(tmp_path: Path, running: list[subprocess.Popen[bytes]]) -> None:
    folder, addresses = tmp_path / "cluster", dict[str, str]()
    for name in "abc":
        addresses[name] = f"127.0.0.1:{_two_free_ports() + 4 * len(addresses)}"
    members = [text for name, address in addresses.items() for text in ("--member", f"{name}={address}")]
    made = _penstock("init", str(folder), *members)
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip().removeprefix("token=")
    for name in addresses:
        command = [*COMMAND, "run", str(folder), name, "--data", str(tmp_path / name)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    hosts = ",".join(addresses.values())
    with penstock.connect(
        f"penstock://{hosts}", token=token, authority=folder / "certificates" / "authority.pem", timeout_s=60
    ) as store:
        store.kv("users").put(b"ada", b"1815", durable=True)
        assert store.kv("users").get(b"ada") == b"1815"
    deadline = time.monotonic() + 60
    while True:
        shown = _penstock("status", str(folder), PENSTOCK_TOKEN=token)
        assert shown.returncode == 0, shown.stderr
        if shown.stdout.count("leads") == 1 and shown.stdout.count("follows") == 2:
            break
        assert time.monotonic() < deadline, shown.stdout
    again = _penstock("init", str(folder), *members)
    assert again.returncode != 0
    assert "cluster.toml" in again.stderr


@pytest.mark.parametrize("members", [(), ("a=127.0.0.1:7401", "b=127.0.0.1:7403"), ("a=nowhere",), ("=127.0.0.1:1",)])
def test_wrong_members_are_told(tmp_path: Path, members: tuple[str, ...]) -> None:
    told = _penstock("init", str(tmp_path / "cluster"), *(text for each in members for text in ("--member", each)))
    assert told.returncode != 0
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "cluster").exists()


def test_a_folder_without_a_cluster_is_told(tmp_path: Path) -> None:
    told = _penstock("run", str(tmp_path), "a", "--data", str(tmp_path / "a"))
    assert told.returncode != 0
    assert "cluster.toml" in told.stderr
    assert not (tmp_path / "a").exists()
