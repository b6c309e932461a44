"""`penstock http`: starts, answers, and ends with a signal."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from owner_processes import until

import penstock
from penstock.cli.certificates import make_certificates
from penstock.cli.http_process import parse_address
from penstock.errors import Invalid
from penstock.http.serving import find_tables


def test_it_answers_until_a_signal(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        store.series("metrics").write("up", 1.0, durable=True)
        command = [sys.executable, "-m", "penstock", "http", store.path, "--table", "metrics", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                assert url.startswith("http://127.0.0.1:")
                with urllib.request.urlopen(f"{url}/api/v1/query?query=up", timeout=20) as answer:
                    assert json.load(answer)["data"]["result"][0]["value"][1] == "1"
                with pytest.raises(urllib.error.HTTPError, match="404"):  # without tokens it has to be asked for
                    urllib.request.urlopen(f"{url}/console/", timeout=20)
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
            finally:
                process.kill()


def test_the_console_gives_an_address_with_its_token(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        store.kv("users").put(b"ada", b"1815", durable=True)
        command = [sys.executable, "-m", "penstock", "console", store.path, "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                printed = json.loads(process.stdout.readline())
                url, _, token = printed["address"].partition("console/#token=")
                assert (printed["write"], len(token), url.startswith("http://127.0.0.1:")) == (False, 48, True)
                request = urllib.request.Request(f"{url}console/api/hello")
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(request, timeout=20)
                request.add_header("Authorization", f"Bearer {token}")
                with urllib.request.urlopen(request, timeout=20) as answer:
                    hello = json.load(answer)["data"]
                assert (hello["write"], [one["name"] for one in hello["tables"]]) == (False, ["users"])
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
            finally:
                process.kill()


def test_a_store_and_its_tables_are_created_if_asked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "http", str(tmp_path / "new"), "--port", "0", "--write"]
    ran = subprocess.run([*command, "--table", "cpu"], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "--create" in ran.stderr) == (3, True)
    command += ["--table", "cpu", "--logs", "lines", "--create"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            urllib.request.urlopen(f"{url}/write", b"idle value=1", timeout=20).close()
        finally:
            process.terminate()
            process.wait(20)
    with penstock.connect(tmp_path / "new") as store:
        assert store.tables() == ["cpu", "lines"]
        assert store.series("cpu").select("idle").num_rows == 1


def test_the_only_series_table_is_the_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with penstock.open(tmp_path / "store") as store:
        assert find_tables(store, None, None, create=False) is None
        with pytest.raises(Invalid, match="needs --table"):
            find_tables(store, None, None, create=True)
        store.kv("rows")
        store.series("one")
        assert find_tables(store, None, None, create=False) == "one"
        store.series("two")
        assert find_tables(store, None, None, create=False) is None
        assert find_tables(store, "two", None, create=False) == "two"
        assert not caplog.records
        assert find_tables(store, "three", None, create=False) == "three"
        assert "there is no series table three yet" in caplog.text
        assert find_tables(store, "rows", None, create=False) == "rows"
        assert "table rows is of the kind kv: requests are answered 404; give --table a series table" in caplog.text


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        command = [sys.executable, "-m", "penstock", "http", store.path, "--host", "0.0.0.0"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 2
        assert "give tokens, certificate and key" in " ".join(ran.stderr.split())
        assert "Traceback" not in ran.stderr


def test_serve_has_it_beside(tmp_path: Path) -> None:
    """`serve --http`: another process, started again if it is killed, and gone when the owner is killed."""
    make_certificates(str(tmp_path), ["localhost"], 10)
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[tokens.reader]\nsha256 = "{digest}"\nrights = {{ metrics = "read" }}\n')
    with penstock.open(tmp_path / "store") as store:
        store.series("metrics").write("up", 1.0, durable=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path / "store"), "--tokens", str(tokens)]
    command += ["--certificate", str(tmp_path / "server.pem"), "--key", str(tmp_path / "server.key")]
    command += ["--http", f"localhost:{port}", "--table", "metrics"]
    context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
    request = urllib.request.Request(
        f"https://localhost:{port}/api/v1/query?query=up", headers={"Authorization": "Bearer secret"}
    )

    def answered() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                return bool(json.load(answer)["data"]["result"])
        except OSError:
            return False

    def beside() -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()]

    def ended(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as owner:
        try:
            until(answered)
            hello_request = urllib.request.Request(
                f"https://localhost:{port}/console/api/hello", headers=request.headers
            )
            with urllib.request.urlopen(hello_request, timeout=20, context=context) as answer:
                hello = json.load(answer)["data"]
            assert (hello["client"], hello["write"]) == ("reader", False)
            (first,) = beside()
            os.kill(first, signal.SIGKILL)
            until(lambda: beside() not in ([], [first]) and answered())
            (second,) = beside()
        finally:
            owner.kill()
    until(lambda: ended(second))


@pytest.mark.parametrize(
    "address", ["9090", ":9090", "localhost:", "localhost:70000", "localhost:x", "localhost:" + "9" * 5_000]
)
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(Invalid, match="HOST:PORT"):
        parse_address(address)
    assert parse_address("[::1]:9090") == ("::1", 9090)
