"""`penstock cluster`, as the guide has it: the files, three members in processes, a client, who leads."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.cluster import read_cluster, replace
from penstock.errors import Invalid
from penstock.replica.identity import member_contexts
from penstock.testing.members import await_true

COMMAND = [sys.executable, "-m", "penstock", "cluster"]
CLUSTER = "00" * 16


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
    for port in range(10_000 + os.getpid() % 10_000 * 2, 32_000, 2):  # not of those that the system gives away
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
    with penstock.open(tmp_path / "a") as alone:  # a store that began alone becomes the first member
        alone.kv("users").put(b"first", b"1", durable=True)
    result = _penstock("init", str(folder), *members, "--from", str(tmp_path / "a"))
    assert result.returncode == 0, result.stderr
    token = result.stdout.strip().removeprefix("token=")
    for name in addresses:
        command = [*COMMAND, "run", str(folder), name, "--data", str(tmp_path / name)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    hosts = ",".join(addresses.values())
    with penstock.connect(
        f"penstock://{hosts}", token=token, authority=folder / "certificates" / "authority.pem", timeout_s=60
    ) as store:
        store.kv("users").put(b"ada", b"1815", durable=True)
        assert list(store.kv("users").scan()) == [(b"ada", b"1815"), (b"first", b"1")]
    _await_status(folder, token)
    stranger = _penstock("status", str(folder), "--token", "wrong")  # no member is away: each of them refuses it
    assert (stranger.returncode, stranger.stdout.count("\trefuses\t"), stranger.stderr.count("\n")) == (1, 3, 1)
    assert "token" in stranger.stderr
    process = running.pop()  # the machine of c is lost: it gets another address and an empty disk
    process.kill()
    process.communicate()
    address = f"127.0.0.1:{_two_free_ports() + 16}"
    replaced = _penstock("replace", str(folder), "c", "--address", address)
    assert replaced.returncode == 0, replaced.stderr
    assert (folder / "certificates" / "c.pem.old1").exists()
    command = [*COMMAND, "run", str(folder), "c", "--data", str(tmp_path / "new")]
    running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    _await_status(folder, token)
    with penstock.connect(
        f"penstock://{address}", token=token, authority=folder / "certificates/authority.pem", reads="local"
    ) as store:
        assert list(store.kv("users", create=False).scan()) == [(b"ada", b"1815"), (b"first", b"1")]
    again = _penstock("init", str(folder), *members)
    assert again.returncode != 0
    assert "cluster.toml" in again.stderr


def _await_status(folder: Path, token: str) -> None:
    """Wait until one member leads and two follow."""
    deadline = time.monotonic() + 60
    while True:
        status = _penstock("status", str(folder), PENSTOCK_TOKEN=token)
        whole = status.stdout.count("leads") == 1 and "away" not in status.stdout
        assert (status.returncode, status.stderr) == (0 if whole else 1, ""), status.stdout  # a script sees it, too
        if whole and status.stdout.count("follows") == 2:
            rows = [line.split("\t") for line in status.stdout.splitlines()]
            assert sum(int(row[4]) for row in rows) > 0  # partitions have masters
            assert max(int(row[3]) for row in rows) > 0  # and the leader says what members have
            return
        assert time.monotonic() < deadline, status.stdout


@pytest.mark.parametrize("descriptors", [8, 14, 18, 22])
def test_a_member_without_descriptors_waits_or_is_refused(
    tmp_path: Path, running: list[subprocess.Popen[bytes]], descriptors: int
) -> None:
    """gRPC aborts a process in which it cannot begin."""
    folder, log = str(tmp_path / "demo"), tmp_path / "log"
    token = _penstock("init", folder, "--member", f"a=127.0.0.1:{_two_free_ports()}").stdout.strip().split("=")[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", f'ulimit -S -n {descriptors}; exec "$@"', "sh"]
            + [*COMMAND, "run", folder, "a", "--data", str(tmp_path / "a")],
            stdout=output,
            stderr=output,
        )
    running.append(process)
    await_true(lambda: process.poll() is not None or b"cannot go on now" in log.read_bytes(), "a refusal")
    assert process.poll() in (None, 4), log.read_text()
    if process.poll() is None:  # it goes on when there is room
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
        await_true(lambda: _penstock("status", folder, "--token", token).returncode == 0, "a member that leads")


def test_certificates_of_members(tmp_path: Path) -> None:
    result = _penstock("certs", str(tmp_path / "set"), "--member", "a=127.0.0.1", "--member", "b=db.example")
    assert result.returncode == 0, result.stderr
    names = {"authority.pem", "authority.key", "a.pem", "a.key", "b.pem", "b.key"}
    assert {path.name for path in (tmp_path / "set").iterdir()} == names
    for members in (("a",), ("a=",), ("a=x", "a=y"), ("1=x",), ("\u00e4=x",)):
        ended = _penstock("certs", str(tmp_path / "no"), *(text for each in members for text in ("--member", each)))
        assert ended.returncode != 0
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "members",
    [
        (),
        ("a=127.0.0.1:7401", "b=127.0.0.1:7403"),
        ("a=nowhere",),
        ("=127.0.0.1:1",),
        ("\u00e4=127.0.0.1:7401",),
        ("a=127.0.0.1:65535",),
        ("a=127.0.0.1:7401", "b=127.0.0.1:7402", "c=127.0.0.1:7411"),  # b's clients would call a's members
        ("a=127.0.0.1:7401", "b=127.0.0.1:7401", "c=127.0.0.1:7411"),
    ],
)
def test_wrong_members_are_told(tmp_path: Path, members: tuple[str, ...]) -> None:
    result = _penstock("init", str(tmp_path / "cluster"), *(text for each in members for text in ("--member", each)))
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "cluster").exists()


@pytest.mark.parametrize(
    "text",
    [
        'cluster = "zz"\n[members.a]\nclients = "127.0.0.1:1"\nmembers = "127.0.0.1:2"\n',
        f'cluster = "{CLUSTER}"\n[members.a]\nclients = "nowhere"\nmembers = "127.0.0.1:2"\n',
        f'cluster = "{CLUSTER}"\n[members.a]\nclients = "127.0.0.1:2"\nmembers = "127.0.0.1:2"\n',
        f'cluster = "{CLUSTER}"\n[members.a-b]\nclients = "127.0.0.1:1"\nmembers = "127.0.0.1:2"\n',
    ],
)
def test_a_file_that_no_cluster_has_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(Invalid, match=r"cluster\.toml is not the file of a cluster"):
        read_cluster(tmp_path)


def _replace_in_child(folder: Path, address: str, fatal: int) -> int:
    """Run `replace` in a child that kills itself before that system call on a file (0: never); return its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    calls = itertools.count(1)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in ("open", "rename", "unlink", "pwrite", "fsync", "fdatasync"):
        setattr(os, name, counted(getattr(os, name)))
    status = 1
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            replace(folder, "c", address)
        status = 0
    finally:
        os._exit(status)


def test_a_replace_that_was_killed_anywhere_is_repeated(tmp_path: Path) -> None:
    ports = [_two_free_ports() + 10 * number for number in range(3)]
    members = [f"{name}=127.0.0.1:{port}" for name, port in zip("abc", ports, strict=True)]
    assert (
        _penstock("init", str(tmp_path / "demo"), *(word for each in members for word in ("--member", each))).returncode
        == 0
    )
    fatal, killed = 0, True
    while killed:
        fatal += 1
        folder, address = tmp_path / f"demo-{fatal}", f"127.0.0.1:{ports[2] + 10}"
        shutil.copytree(tmp_path / "demo", folder)
        killed = os.WIFSIGNALED(_replace_in_child(folder, address, fatal))
        read_cluster(folder)  # those that run read it all the time
        for name in "ab":
            member_contexts(folder / "certificates", name)
        assert _replace_in_child(folder, address, 0) == 0
        assert read_cluster(folder).members["c"].clients == address
        member_contexts(folder / "certificates", "c")  # its certificate is one of its key
        old = {path.read_bytes() for path in (folder / "certificates").glob("c.*old*")}
        assert {path.read_bytes() for path in (tmp_path / "demo" / "certificates").glob("c.*")} <= old
    assert fatal > 10


def test_the_policy_of_masters_is_recorded(tmp_path: Path) -> None:
    member = '[members.a]\nclients = "127.0.0.1:1"\nmembers = "127.0.0.1:2"\n'
    for text, policy in (("", "hash"), ('masters = "fixed:a"\n', "fixed:a"), ('masters = "disabled"\n', "disabled")):
        (tmp_path / "cluster.toml").write_text(
            f'cluster = "{CLUSTER}"\n{text}{member}'
        )  # the first is of an older version
        assert read_cluster(tmp_path).masters == policy
    for wrong in ('"fixed:b"', '"none"', "1", "true"):
        (tmp_path / "cluster.toml").write_text(f'cluster = "{CLUSTER}"\nmasters = {wrong}\n{member}')
        with pytest.raises(Invalid, match=r"cluster\.toml is not the file of a cluster"):
            read_cluster(tmp_path)
    result = _penstock("init", str(tmp_path / "no"), "--member", "a=127.0.0.1:1", "--masters", "fixed:b")
    assert result.returncode != 0
    assert "masters is 'fixed:b'" in result.stderr
    assert not (tmp_path / "no").exists()


def test_a_folder_without_a_cluster_is_told(tmp_path: Path) -> None:
    result = _penstock("run", str(tmp_path), "a", "--data", str(tmp_path / "a"))
    assert result.returncode != 0
    assert "cluster.toml" in result.stderr
    assert not (tmp_path / "a").exists()
    result = _penstock("replace", str(tmp_path), "a")
    assert result.returncode != 0
    assert "cluster.toml" in result.stderr
