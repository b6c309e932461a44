"""Puts while the console is open: five pages that listen, against none.

The owner is this process. The console is `penstock console` in a process of its own, as users run it, and the pages are
five event streams in a third process, which reads every sample and opens what the screens read now and then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import penstock
from bench.harness import Case, Goal, folder, run, sized

PAGES = 5
SECONDS = sized(10.0, 1.0)  # several samples of the console, and looks at the sizes of tables: every 1 and 4 seconds
EACH = 20_000  # puts between two looks at the clock
WITH = f"puts, {PAGES} pages of the console open"
WITHOUT = "puts, no console"
# What five browsers do: each listens, and one of the screens asks for its data every two seconds.
BROWSERS = """
import http.client, itertools, sys, threading, time
port, token, pages = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
headers = {"Authorization": "Bearer " + token}

def page(number):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/console/events", headers=headers)
    answer = connection.getresponse()
    answer.readline()
    sys.stdout.write("open\\n")  # in one call: threads share it
    sys.stdout.flush()
    while answer.readline():
        pass

for number in range(pages):
    threading.Thread(target=page, args=(number,), daemon=True).start()
for path in itertools.cycle(["jobs", "table?table=rows", "chunks?table=rows", "rows?table=rows", "hello"]):
    time.sleep(2.0)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/console/api/" + path, headers=headers)
    connection.getresponse().read()
    connection.close()
"""


@contextmanager
def five_pages(path: str) -> Iterator[None]:
    """The console of a store, with pages open."""
    command = [sys.executable, "-m", "penstock", "console", path, "--port", "0", "--json"]
    with ExitStack() as ends:
        console = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ends.callback(console.terminate)
        assert console.stdout is not None
        address, _, token = json.loads(console.stdout.readline())["address"].partition("/console/#token=")
        arguments = [address.rpartition(":")[2], token, str(PAGES)]
        browsers = ends.enter_context(
            subprocess.Popen([sys.executable, "-c", BROWSERS, *arguments], stdout=subprocess.PIPE, text=True)
        )
        ends.callback(browsers.kill)
        assert browsers.stdout is not None
        for _ in range(PAGES):
            assert browsers.stdout.readline() == "open\n"
        yield


def puts(store: penstock.Store) -> float:
    table, value, done = store.kv("rows"), bytes(100), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        for number in range(done, done + EACH):
            table.put(b"%012d" % number, value)
        done += EACH
    store.flush()
    return done / (time.perf_counter() - begin)


def without() -> float:
    with folder() as path, penstock.open(f"{path}/store") as store:
        store.kv("rows").put(b"first", b"", durable=True)
        time.sleep(2.0)  # as long as the console needs to start, with the store idle
        return puts(store)


def with_pages() -> float:
    with folder() as path, penstock.open(f"{path}/store") as store:
        store.kv("rows").put(b"first", b"", durable=True)
        with five_pages(store.path):
            return puts(store)


def main() -> bool:
    cases = [Case(name=WITH, run=with_pages), Case(name=WITHOUT, run=without, peer_of=WITH)]
    return run("console", cases, [Goal(ours=WITH, ratio=0.95, gate=True)])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
