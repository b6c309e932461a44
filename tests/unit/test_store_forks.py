"""Children of an owner: they hold nothing of its store, and do nothing to it.

Every scenario is a program of its own: a fork beside the threads of a test run is no good.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_guard import make_certificate

import penstock
from penstock.errors import StoreLocked

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

BEGIN = """
import gc, multiprocessing, os, socket, subprocess, sys, threading, time
import penstock
from penstock.host import forking, threads
from penstock.host.file_locks import OsLock
PATH = sys.argv[1]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def descriptors():
    "What this process has open of the store: (target, whether it carries a lock)."
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            with open(f"/proc/self/fdinfo/{name}") as info:
                locked = "FLOCK" in info.read()
        except OSError:
            continue
        if target.startswith("socket:"):
            target = f"socket: {forking.address_of(int(name))}"
        if PATH in target:
            found.append((target, locked))
    return found

def locks():
    return [target for target, locked in descriptors() if locked]

def sockets():
    return [target for target, _ in descriptors() if target.startswith("socket:")]
"""

OPEN = """
store = penstock.open(PATH)
table = store.kv("t")
table.put(b"a", b"1", durable=True)
"""

FORK = """
ready, go = os.pipe()
child = os.fork()
if child == 0:
    os.write(go, b"x")
    time.sleep(600)
os.read(ready, 1)  # the child has begun
"""
CHILDREN = {
    "fork": FORK,
    "fork in a thread": """
pids = []
def run():
    child = os.fork()
    if child == 0: time.sleep(600)
    pids.append(child)
thread = threading.Thread(target=run); thread.start(); thread.join()
child = pids[0]
""",
    "fork, then exec": "child = os.fork()\nif child == 0: os.execv(SLEEP[0], SLEEP)",
    "subprocess": "child = subprocess.Popen(SLEEP).pid",
    "subprocess that inherits": "child = subprocess.Popen(SLEEP, close_fds=False).pid",
    "subprocess with a function": "child = subprocess.Popen(SLEEP, close_fds=False, preexec_fn=lambda: None).pid",
    **{
        f"multiprocessing by {method}": f"""
worker = multiprocessing.get_context("{method}").Process(target=time.sleep, args=(600,))
worker.start()
child = worker.pid
"""
        for method in ("fork", "spawn", "forkserver")
    },
}


def program(tmp_path: Path, body: str) -> list[str]:
    """A file and not -c: multiprocessing imports it again."""
    main = textwrap.indent(body, "    ")
    (tmp_path / "program.py").write_text(f"{BEGIN}\nif __name__ == '__main__':\n{main}\n")
    return [sys.executable, "-W", "ignore", str(tmp_path / "program.py"), str(tmp_path / "s")]


def run(tmp_path: Path, body: str) -> str:
    """What a program prints; it must end well."""
    ended = subprocess.run(
        program(tmp_path, body), env=ENVIRONMENT, timeout=120, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


class Owner:
    """A process that owns a store, and a child of it. What it prints comes before the child's number."""

    def __init__(self, tmp_path: Path, body: str, lines: int = 0) -> None:
        body += "\nprint(child, flush=True); time.sleep(600)"
        self.process = subprocess.Popen(program(tmp_path, body), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines = [output.readline().strip() for _ in range(lines)]
            self.child = int(output.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.child, signal.SIGKILL)
        self.kill()


@pytest.mark.parametrize("how", CHILDREN)
def test_a_child_does_not_keep_the_store_of_a_killed_owner(tmp_path: Path, how: str) -> None:
    with Owner(tmp_path, OPEN + CHILDREN[how]) as owner:
        with pytest.raises(StoreLocked):
            penstock.open(tmp_path / "s", timeout_s=0.1)
        owner.kill()
        os.kill(owner.child, 0)  # it is still there
        with penstock.open(tmp_path / "s", timeout_s=20.0) as store:
            assert store.kv("t").get(b"a") == b"1"


def test_a_child_that_keeps_its_copy_is_seen(tmp_path: Path) -> None:
    """The negative control."""
    seeded = "OsLock._close = lambda self: None\n"
    with Owner(tmp_path, seeded + OPEN + FORK) as owner:
        owner.kill()
        with pytest.raises(StoreLocked):
            penstock.open(tmp_path / "s", timeout_s=0.1)


SERVED = f"""
{OPEN}
from penstock.server.service import service_of
location = service_of(store).location()
client = penstock.connect(PATH)
assert client.kv("t").get(b"a") == b"1"
print(location.removeprefix("grpc+unix://"), flush=True)
"""


@pytest.mark.parametrize("seeded", [False, True])
def test_a_child_does_not_answer_for_a_killed_owner(tmp_path: Path, seeded: bool) -> None:
    """Neither at the control socket nor at Arrow Flight's socket: who connects must hear that nobody is there."""
    bug = "import penstock.server.service as s; s.detach_sockets = lambda belongs: None\n" if seeded else ""
    with Owner(tmp_path, bug + SERVED + FORK, lines=1) as owner:
        owner.kill()
        answered = []
        for path in (owner.lines[0], str(tmp_path / "s" / "run" / "control")):
            with socket.socket(socket.AF_UNIX) as knocking:
                knocking.settimeout(20.0)
                answered.append(knocking.connect_ex(path) == 0)
        assert answered == [seeded, False]


@pytest.mark.parametrize("seeded", [False, True])
def test_a_child_does_not_keep_the_port_of_a_killed_owner(tmp_path: Path, seeded: bool) -> None:
    """With the negative control: a port that a child listens on takes connections that nobody serves."""
    certificate, key = make_certificate(tmp_path)
    serve = f"""
import ssl
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain({str(certificate)!r}, {str(key)!r})
port = service_of(store).listen("127.0.0.1", 0, tls, lambda token: None)
line = socket.create_connection(("127.0.0.1", port))  # and one that is under way
print(port, flush=True)
"""
    bug = "import penstock.server.service as s; s.detach_sockets = lambda belongs: None\n" if seeded else ""
    with Owner(tmp_path, bug + SERVED + serve + FORK, lines=2) as owner:
        owner.kill()
        with socket.socket() as knocking:
            knocking.settimeout(20.0)
            assert (knocking.connect_ex(("127.0.0.1", int(owner.lines[1]))) == 0) == seeded


def test_a_forked_child_has_no_lock_and_no_socket_of_its_parent(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        SERVED
        + """
child = os.fork()
if child == 0:
    print("child", locks(), sockets(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert locks() and sockets()
assert client.kv("t").get(b"a") == b"1"  # the parent's own are as they were
client.close()
store.close()
""",
    )
    assert "child [] []" in output


def test_a_started_program_inherits_nothing(tmp_path: Path) -> None:
    listing = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 3])"
    output = run(
        tmp_path,
        SERVED
        + f"""
store.queue("q").put(b"m", durable=True)
store.compact("t")
print(subprocess.run([sys.executable, "-c", {listing!r}], close_fds=False, capture_output=True, text=True).stdout)
client.close()
store.close()
""",
    )
    assert str(tmp_path / "s") not in output.split("\n", 1)[1], output


def test_a_fork_while_others_open_and_close(tmp_path: Path) -> None:
    """Whatever line an opening has reached in another thread, a child has no lock."""
    output = run(
        tmp_path,
        """
ended, results = threading.Event(), []
def fork():
    while not ended.is_set():
        child = os.fork()
        if child == 0:
            os._exit(1 if locks() or sockets() else 0)
        results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
forking_thread = threading.Thread(target=fork); forking_thread.start()
for _ in range(15):
    store = penstock.open(PATH)
    store.kv("t").put(b"a", b"1", durable=True)
    store.close()
ended.set(); forking_thread.join()
print(len(results) > 20, set(results))
""",
    )
    assert output == "True {0}\n"


ENDS = {
    "it exits": "sys.exit(0)",
    "it closes what it has": "client.close(); store.close(); sys.exit(0)",
    "it lets go of what it has": "client = store = table = None; gc.collect(); sys.exit(0)",
    "it is killed": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_child_does_its_parents_store_no_harm(tmp_path: Path, how: str) -> None:
    output = run(
        tmp_path,
        SERVED
        + f"""
table.put(b"b", b"2")  # in memory only: the child must not write it
child = os.fork()
if child == 0:
    {ENDS[how]}
os.waitpid(child, 0)
try:
    penstock.open(PATH, timeout_s=0.1)
except penstock.errors.StoreLocked:
    print("locked")
for number in range(50):
    table.put(b"%d" % number, b"x", durable=True)
    assert store._manifest.get_job(1) is None
store.compact("t")
assert client.kv("t").get(b"b") == b"2"
other = penstock.connect(PATH)
assert other.kv("t").get(b"49") == b"x"
other.close(); client.close(); store.close()
with penstock.open(PATH) as store:
    print(sum(1 for _ in store.kv("t").scan()))
""",
    )
    assert output.split("\n")[1:3] == ["locked", "52"]


HOW_USED = {
    "connected": "client = penstock.connect(PATH + '2', create=True)",
    "closed": "penstock.connect(PATH + '2', create=True).close()",
    "served": "subprocess.run([sys.executable, '-c', CONNECT], check=True)",
}


@pytest.mark.parametrize("how", HOW_USED)
def test_a_child_of_a_process_that_used_grpc_is_refused_at_once(tmp_path: Path, how: str) -> None:
    output = run(
        tmp_path,
        OPEN
        + f"""
import subprocess, sys
CONNECT = "import penstock; penstock.connect(%r).close()" % PATH
{HOW_USED[how]}
child = os.fork()
if child == 0:
    for act in (lambda: penstock.connect(PATH), lambda: penstock.connect(PATH + "3", create=True)):
        try:
            act()
        except penstock.errors.Closed as error:
            print("spawn" in str(error), flush=True)
    if os.fork() == 0:  # nor does a grandchild
        try:
            penstock.connect(PATH)
        except penstock.errors.Closed as error:
            print("spawn" in str(error), flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.waitpid(child, 0)
store.kv("t").put(b"b", b"2", durable=True)
with penstock.connect(PATH) as client:
    print(client.kv("t").get(b"b"))
""",
    )
    assert output == "True\nTrue\nTrue\nb'2'\n"


def test_a_child_that_wants_the_store_connects(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        OPEN
        + """
ready, go = os.pipe()
child = os.fork()
if child == 0:
    os.read(ready, 1)
    try:
        penstock.open(PATH, timeout_s=1.0)
    except penstock.errors.Closed as error:
        print("connect" in str(error), flush=True)
    with penstock.connect(PATH) as client:
        print(client.kv("t").get(b"a"), flush=True)
    os._exit(0)
store.close()
os.write(go, b"x")
os.waitpid(child, 0)
with penstock.connect(PATH): pass
""",
    )
    assert output == "True\nb'1'\n"
