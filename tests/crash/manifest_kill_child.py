"""Commit with 8 threads until killed, telling of each commit on standard output after it returned.

Run by `test_manifest_kill.py`. Each thread keeps a chain of chunks of its own: one commit adds number n and a counter
and removes n - 10. Jobs are enqueued, leased and completed in between, and some are left in flight. With
`early` it tells before it commits: the mistake that the test must see.
"""

from __future__ import annotations

import random
import sys
import threading

from penstock.errors import PenstockError
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import ChunkEntryRecord, WalStateRecord
from penstock.manifest.recovery import recover
from penstock.manifest.settings import ManifestSettings

THREADS = 8
RETAINED = 10


def main(path: str, *, early: bool) -> None:
    manifest = Manifest.open(path, ManifestSettings(map_bytes=1 << 20))
    jobs = JobQueue(manifest, random=random.Random(1))
    recover(manifest, jobs)
    output_lock = threading.Lock()

    def tell(*words: object) -> None:
        with output_lock:
            sys.stdout.write(" ".join(map(str, words)) + "\n")
            sys.stdout.flush()

    def work(worker: int) -> None:
        while True:
            state = manifest.get_wal_state(WalStateKey(worker, 1)) or WalStateRecord()
            number = state.stored_lsn + 1
            txn = manifest.begin_write()
            txn.upsert_chunk(ChunkKey(worker, number), ChunkEntryRecord(f"{worker}/{number}", 1, number))
            if number > RETAINED:
                txn.delete_chunk(ChunkKey(worker, number - RETAINED))
            txn.put_wal_state(WalStateKey(worker, 1), WalStateRecord(number, number, number, number))
            if early:
                tell("commit", worker, number, 0)
                txn.commit()
            else:
                tell("commit", worker, number, txn.commit().generation)
            if number % 7 == 0:
                try:
                    job_id = jobs.enqueue(64, db_id=worker)
                    tell("enqueued", job_id)
                except PenstockError:
                    pass
            lease = jobs.acquire(f"w{worker}")
            if lease is not None and number % 3:
                jobs.complete(lease)
                tell("completed", lease.job.job_id)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(1, THREADS + 1)]
    for thread in threads:
        thread.start()
    tell("ready")
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], early="early" in sys.argv)
