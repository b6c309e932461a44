"""What a forked child gives up: sockets by their own address, and nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from penstock.host.forking import address_of, close_on_exec, detach_sockets


def test_only_sockets_of_the_service_are_given_up(tmp_path: Path) -> None:
    ours, others = str(tmp_path / "ours"), str(tmp_path / "others")
    listeners = {}
    for path in (ours, others):
        listeners[path] = socket.socket(socket.AF_UNIX)
        listeners[path].bind(path)
        listeners[path].listen(1)
    with socket.socket(socket.AF_UNIX) as client, open(tmp_path / "file", "wb") as file:
        client.connect(ours)
        accepted, _ = listeners[ours].accept()
        before = set(os.listdir("/proc/self/fd"))
        detach_sockets(lambda address: address == ours)
        assert set(os.listdir("/proc/self/fd")) == before  # no number is free, and none is new
        given_up = [
            address_of(each.fileno()) is None for each in (listeners[ours], accepted, listeners[others], client)
        ]
        assert given_up == [True, True, False, False]
        assert file.write(b"x") == 1
        for each in (*listeners.values(), accepted):
            os.close(each.detach())


def test_a_descriptor_that_a_library_left_inheritable(tmp_path: Path) -> None:
    descriptors = []
    for name in ("a", "b"):
        descriptors.append(os.open(tmp_path / name, os.O_CREAT | os.O_RDWR))
        os.set_inheritable(descriptors[-1], True)
    close_on_exec(str(tmp_path / "a"))
    assert list(map(os.get_inheritable, descriptors)) == [False, True]
    for descriptor in descriptors:
        os.close(descriptor)
