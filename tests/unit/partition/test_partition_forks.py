"""A fork while shards are late: the child holds nothing and waits for nobody; the owner's shards catch up.

In a process of its own: a fork beside the threads of a test run is no good.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import os, sys, threading, time
import penstock
from penstock.errors import Closed, PartitionPaused, PenstockError
from penstock.queue.machine import QueueMachine

path, fails, apply, healed = sys.argv[1], sys.argv[2] == "fails", QueueMachine.apply, threading.Event()
limits = penstock.DispatcherSettings(stall_s=0.2, attempts_max=2, backoff_s=0.01)
store = penstock.open(path, settings=penstock.StoreSettings(dispatcher=limits))
sick, well = store.queue("sick", changes=True), store.kv("well")
sick.put(b"0", durable=True)
feed, subscription = sick.changes(), store.subscribe()
assert feed.to_arrow().num_rows == 1

def patched(machine, entry):
    if machine._descriptor.name == "sick" and not healed.is_set():
        if fails:
            raise OSError(5, "Input/output error")
        healed.wait(60)
    apply(machine, entry)

QueueMachine.apply = patched
for number in range(1, 5):
    with store.batch() as batch:
        batch.queue("sick").put(b"%d" % number)
        batch.kv("well").put(b"%d" % number, b"v")
wanted = {"fails": "paused", "hangs": "frozen"}[sys.argv[2]]
until = time.monotonic() + 30
while True:
    (state,) = [one.state for one in store.statistics().partitions if one.table == "sick"]
    if state == wanted:
        break
    assert time.monotonic() < until, state
    time.sleep(0.01)
child = os.fork()
if child == 0:
    code = 1
    try:
        acts = [
            lambda: sick.put(b"child"), lambda: well.put(b"child", b""), lambda: well.get(b"1"), lambda: store.flush(),
            lambda: store.wait_for(1), lambda: feed.to_arrow(),
            lambda: store.statistics(), lambda: store.subscribe(),
            lambda: store.resume("sick"), lambda: store.checkpoint(), lambda: store.snapshot(),
        ]
        for act in acts:
            try:
                act()
            except Closed:
                continue
            raise SystemExit(f"not refused: {acts.index(act)}")
        store.close()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
well.put(b"5", b"v", durable=True)
healed.set()
store.resume("sick")
while store.troubles():  # on a busy machine it is late again
    assert time.monotonic() < until + 30, store.troubles()
    time.sleep(0.01)
assert sick.to_arrow().column("payload").to_pylist() == [b"%d" % number for number in range(5)]
assert sick.changes().to_arrow().num_rows == 5
store.close()
with penstock.open(path) as store:
    assert len(store.queue("sick").read()) == 5 == len(list(store.kv("well").scan()))
print("well", flush=True)
"""


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_fork_while_a_shard_is_late(tmp_path: Path, how: str) -> None:
    program = [sys.executable, "-c", FORKED, str(tmp_path / "store"), how]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout == "well\n", ended.stderr[-3_000:]
