"""Ways to a store that lead nowhere: one clear error of Penstock, and no write is given up for what may pass."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from owner_processes import owners, until

from penstock.client.connect import connect
from penstock.errors import Invalid, OutcomeUnknown, ProcessLimit, RetryLater
from penstock.host.file_errors import translate_open_errors


def file_in_the_way(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def under_a_file(folder: Path) -> Path:
    return file_in_the_way(folder) / "store"


def folder_for_opening(folder: Path) -> Path:
    (folder / "OPENING").mkdir()
    return folder


def folder_for_queries(folder: Path) -> Path:
    """Found by the owner that is started, which has to say so."""
    (folder / "run" / "queries").mkdir(parents=True)
    return folder


def long_name(folder: Path) -> Path:
    return folder / ("n" * 300)


WAYS = [file_in_the_way, under_a_file, folder_for_opening, folder_for_queries, long_name]


@pytest.mark.parametrize("way", WAYS)
def test_a_path_that_cannot_be_a_store(tmp_path: Path, way: Any) -> None:
    with pytest.raises(Invalid, match=str(tmp_path)):
        connect(way(tmp_path), create=True, timeout_s=20.0)


@pytest.mark.parametrize("address", ["localhost:99999", "a b:1", "localhost:x"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(Invalid, match="is not an address"):
        connect(f"penstock://{address}", token="t", timeout_s=1.0)


@pytest.mark.parametrize("content", [b"garbage", b"\xff\xfe", b""])
def test_an_authority_that_is_no_certificate(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(Invalid, match="PEM"):
        connect("penstock://localhost:1", token="t", authority=tmp_path / "ca.pem", timeout_s=1.0)


def test_a_token_that_is_no_text() -> None:
    with pytest.raises(Invalid, match="needs a token"):
        connect("penstock://localhost:1", token=5, timeout_s=1.0)  # type: ignore[arg-type]


def test_errors_of_the_system_are_sorted_by_what_to_do() -> None:
    for code in range(1, 134):
        with pytest.raises(Exception) as raised, translate_open_errors("/store"):
            raise OSError(code, os.strerror(code))
        assert type(raised.value).__module__ == "penstock.errors" or isinstance(raised.value, TimeoutError), code


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Take every descriptor of this process."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_client_without_descriptors_goes_on_when_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "store"
    connect(path, create=True).close()  # starting an owner may take a while
    with connect(path, timeout_s=1.5) as client:
        users = client.kv("users")
        users.put(b"ada", b"1815", durable=True)
        (pid,) = owners(path)
        with no_descriptors():
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RetryLater):
                users.get(b"ada")
            with pytest.raises(ProcessLimit):
                connect(path, timeout_s=0.1)
            with pytest.raises(OutcomeUnknown):
                users.put(b"ada", b"1816", durable=True)
        until(lambda: users_of(client) == b"1816")  # it was still being sent, and nobody had to recover
    for pid in owners(path):
        os.kill(pid, signal.SIGKILL)


def users_of(client: Any) -> bytes | None:
    try:
        value: bytes | None = client.kv("users").get(b"ada")
    except RetryLater:
        return None
    return value
