"""One member of a cluster that writes whenever it leads: `member_process.py FOLDER NAME`.

FOLDER has `cluster.json` and the certificates. Every acknowledged write is a line of NAME.told, written after its
acknowledgement; a line "ready" on standard output says that the member runs. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from penstock.errors import PenstockError
from penstock.replica.raft import RaftTimes
from penstock.server.member import Member
from penstock.store.settings import StoreSettings


def main(folder: Path, name: str) -> None:
    config = json.loads((folder / "cluster.json").read_text())
    member = Member(
        folder / name,
        name,
        {each: (host, port) for each, (host, port) in config["members"].items()},
        cluster=bytes.fromhex(config["cluster"]),
        certificates=folder / "certificates",
        settings=StoreSettings(serve=False),
        times=RaftTimes(heartbeat_s=0.05, election_s=0.4),
    )
    print("ready", flush=True)
    stopped = threading.Event()
    threading.Thread(target=_await_end, args=(stopped,), daemon=True).start()
    with (folder / f"{name}.told").open("a") as told:
        number = 0
        while not stopped.is_set():
            if not member.is_leader:
                time.sleep(0.02)
                continue
            try:
                store = member.store(1.0)
                store.kv("rows"), store.queue("events")  # created by the first that leads
                number += 1
                key = f"{name}-{os.getpid()}-{number}"
                with store.batch(token=(name, time.time_ns())) as batch:  # both or none, once
                    batch.kv("rows").put(key.encode(), b"value of " + key.encode())
                    batch.queue("events").put(key.encode())
                store.flush()
            except PenstockError as error:
                print(type(error).__name__, error, file=sys.stderr, flush=True)
                time.sleep(0.02)
                continue
            told.write(f"{key}\n")
            told.flush()
    member.close()


def _await_end(stopped: threading.Event) -> None:
    sys.stdin.read()
    stopped.set()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
