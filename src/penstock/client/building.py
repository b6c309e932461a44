"""Chooses where a client builds files: in the store's folder if it can access it, else in a temporary folder.

Files from a temporary folder are sent to the owner.

Thread: the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.archive.storage import FileStorage
from penstock.host import threads
from penstock.host.file_operations import make_dirs
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import parent
from penstock.journal.partitions import PartitionId
from penstock.kinds import BuildContext
from penstock.partition.reference import StagedFile, files_of
from penstock.store.identity import StoreIdentity, read_uuid

if TYPE_CHECKING:
    from penstock.client.port import FlightPort


@contextmanager
def building(
    port: Callable[[], FlightPort], root: str, store: tuple[bytes, bytes], time_us: int, lease_s: float
) -> Iterator[BuildContext]:
    """Provide a context to build files for a store, which is in `root` if this process can access it.

    `store` is the identity of its files, and its UUID. `port` is called when the first file is begun: few rows need
    none. `time_us` is the store's time.
    """
    fs, (identity, uuid) = OsFileSystem(), StoreIdentity(*store)

    def reserve(partition: PartitionId, count: int) -> list[StagedFile]:
        return port().stage(partition, count, lease_s)

    def storage_of(table_id: int) -> FileStorage:
        return port().files_of(table_id)

    if read_uuid(fs, root) == uuid:
        yield BuildContext(root, identity, reserve, time_us, threads.process_name(), files_of=storage_of, uuid=uuid)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as folder:

        def reserve_here(partition: PartitionId, count: int) -> list[StagedFile]:
            staged = reserve(partition, count)
            for file in staged:
                make_dirs(fs, parent(f"{folder}/{file.file_name}"))
            return staged

        def send(partition: PartitionId, staged: StagedFile) -> None:
            for name in files_of(staged.file_name):
                file = fs.open(f"{folder}/{name}")
                try:
                    port().send_file(partition, staged, name, file)
                finally:
                    file.close()

        yield BuildContext(
            folder,
            identity,
            reserve_here,
            time_us,
            threads.process_name(),
            hand_over=send,
            files_of=storage_of,
            uuid=uuid,
        )
