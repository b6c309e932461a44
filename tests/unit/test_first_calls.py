"""Ctrl-C in the first call of a process: pyarrow imports pandas there, and drops what the import raises.

An interrupt at any moment of that import is the same as one at its beginning, so the test raises it there, in the main
thread of a fresh process for each call: the call raises it, or does not import pandas in that thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

CALLS = {
    "a message": "consumer.get(1, 30)",
    "messages of a shard": "events.read()",
    "a queue as Arrow": "events.to_arrow()",
    "messages with keys": "events.put_many([b'a', b'b'], keys=[b'1', b'2'])",
    "headers": "events.put(b'a', headers={'a': b'b'})",
    "a get": "users.get(b'k')",
    "a scan": "list(users.scan())",
    "several keys": "users.multi_get([b'k', b'l'])",
    "a table as Arrow": "users.to_arrow()",
    "a count": "users.count()",
    "a struct": "store.kv('structs', value=pa.struct([('a', pa.int64())])).put(b'k', {'a': 1})",
    "rows of Arrow": "users.put_many(rows)",
    "a load": "store.load('users', rows)",
    "a sample": "metrics.write('cpu', 1.0, {'host': 'a'}, durable=True)",
    "a selector": "metrics.select('cpu')",
    "a snapshot": "store.snapshot().kv('users').to_arrow()",
}
PROGRAM = r"""
    import json, os, shutil, sys, threading
    import pyarrow as pa
    import penstock

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "pandas":
                if threading.current_thread() is threading.main_thread():
                    asked.append(name)
                    raise KeyboardInterrupt
                raise ImportError("as if it were not installed")

    sys.meta_path.insert(0, Finder())
    asked = []
    folder, calls, outcomes = sys.argv[1], json.loads(sys.argv[2]), {}
    key = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"k")])
    rows = pa.RecordBatch.from_arrays([key, key], ["key", "value"])
    for name, call in calls.items():
        reading, writing = os.pipe()
        if not os.fork():
            said, begun = "nothing", False
            try:
                store = penstock.open(os.path.join(folder, name))
                users, events = store.kv("users"), store.queue("events", headers=True)
                metrics, consumer = store.series("metrics"), events.consumer("c")
                users.put(b"k", b"v")
                events.put(b"m", durable=True)
                assert "pandas" not in sys.modules
                begun = not asked
                exec(call)
                said = "an interrupt was lost" if asked else "it returned"
            except BaseException as error:
                said = type(error).__name__ if begun else f"opening imported pandas, or failed: {error!r}"
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        outcomes[name] = os.read(reading, 100).decode()
        os.close(reading)
        os.wait()
    print(json.dumps(outcomes))
"""


def test_no_first_call_loses_an_interrupt(tmp_path: Path) -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), json.dumps(CALLS)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr == ""
    outcomes = json.loads(ended.stdout)
    assert outcomes.keys() == CALLS.keys()
    assert set(outcomes.values()) <= {"it returned", "KeyboardInterrupt"}, outcomes
