"""More of what is fuzzed: files beside tables and journal, and the messages of members; see `fuzz_targets`.

Each entry has good bytes to begin with, and a function that takes any bytes and returns whether it accepted them.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable

import google_crc32c

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.archive.container import create_chunk, open_chunk
from penstock.archive.framed import HEADER_BYTES
from penstock.errors import CorruptionError, Invalid, KeyMissing, UnsupportedVersion
from penstock.host.file_operations import make_dirs
from penstock.host.paths import parent
from penstock.host.steady_clock import NOTE_BYTES, TimeNote
from penstock.manifest.records import ChunkEntryRecord, WalStateRecord
from penstock.partition.snapshot_folder import (
    PartitionSnapshotHeader,
    SnapshotFile,
    decode_header,
    encode_header,
)
from penstock.replica import messages
from penstock.store.backup_folder import LISTING, VERSION, BackedFile, BackupFolder, BackupListing
from penstock.testing import SimulatedDisk

_IDENTITY = bytes(range(16))


def _snapshot_seeds() -> list[bytes]:
    chunk = ChunkEntryRecord(file_name="tables/2/0/1.sst", generation=1, size_bytes=10)
    header = PartitionSnapshotHeader(
        store=_IDENTITY,
        partition=2 << 17,
        table="t",
        kind="kv",
        lsn=5,
        partition_index=5,
        term=1,
        index=9,
        progress=((0, WalStateRecord(5, 5, 5, 5)),),
        chunks=((1, chunk),),
        files=(SnapshotFile("1.sst", 10, bytes(16)),),
    )
    return [encode_header(header)]


def _snapshot(data: bytes) -> bool:
    accepted = False
    body = data[20:]
    right = data[:8] + struct.pack("<IQ", google_crc32c.value(body), len(body)) + body
    for content in (data, right):
        with contextlib.suppress(CorruptionError, UnsupportedVersion):
            header = decode_header(content, "snapshot.header")
            assert decode_header(encode_header(header), "snapshot.header") == header
            accepted = True
    return accepted


def _listing_seeds() -> list[bytes]:
    disk = SimulatedDisk()
    folder = BackupFolder(disk, "/backups")
    disk.mkdir("/backups")
    folder.prepare("00" * 16)
    folder.begin([])
    files = [BackedFile("tables/2/0/1.sst", 10, 7, 7, True), BackedFile("journal/1.log", 5, 1, 2, False)]
    listing = BackupListing(VERSION, 1, "00" * 16, "11" * 16, 9, 1_000, files)
    for each in files:
        make_dirs(disk, parent(folder.path_of(listing, each)))
    folder.publish(listing)
    file = disk.open(f"{folder.own(1)}/{LISTING}")
    return [file.pread(file.size(), 0)]


def _listing(data: bytes) -> bool:
    accepted = False
    body = data[: data.rfind(b"\n", 0, len(data) - 1)] if b"\n" in data[:-1] else data
    for content in (data, body + b'\n{"crc32c":"%08x"}\n' % google_crc32c.value(body)):
        disk = SimulatedDisk()
        folder = BackupFolder(disk, "/backups")
        disk.mkdir("/backups")
        folder.prepare("00" * 16)
        folder.begin([])
        disk.put_atomically(f"{folder.own(1)}/{LISTING}", content)
        with contextlib.suppress(CorruptionError, UnsupportedVersion):
            listing = folder.listing(1)
            paths = [folder.path_of(listing, file) for file in listing.files]
            assert all(path.startswith("/backups/") and "/../" not in path for path in paths), paths
            assert all(file.size >= 0 for file in listing.files)
            accepted = True
    return accepted


def _member_seeds() -> list[bytes]:
    some: list[messages.Message] = [
        messages.RequestVote(term=3, last_index=9, last_term=2),
        messages.Append(
            term=3,
            previous_index=9,
            previous_term=2,
            committed=8,
            needed=0,
            entries=((2, b"body"), (3, None)),
        ),
        messages.Appended(term=3, next_index=12, success=True, reset=False),
    ]
    return [messages.pack(message) for message in some]


def _member(data: bytes) -> bool:
    with contextlib.suppress(Invalid):
        message = messages.unpack(data)
        assert messages.unpack(messages.pack(message)) == message
        if isinstance(message, messages.Append):
            entries = messages.received_entries(message)
            assert messages.sent_entries(entries) == message.entries
        return True
    return False


def _note_seeds() -> list[bytes]:
    return [TimeNote(1_700_000_000_000_000, 5, b"boot").encode(_IDENTITY)]


def _note(data: bytes) -> bool:
    right = data[: NOTE_BYTES - 4] + struct.pack("<I", google_crc32c.value(_IDENTITY + data[: NOTE_BYTES - 4]))
    accepted = False
    for content in (data, right):
        note = TimeNote.decode(content, _IDENTITY)
        if note is not None:
            assert TimeNote.decode(note.encode(_IDENTITY), _IDENTITY) == note
            accepted = True
    return accepted


def _container_seeds() -> list[bytes]:
    seeds = []
    for codec in ("zstd", "lz4"):
        disk = SimulatedDisk()
        sealing = Sealing(codec=codec, keys=None, random=random.Random(1))
        writer = create_chunk(disk, "/chunk", ChunkIdentity(store=_IDENTITY, chunk_id=7), sealing)
        writer.write(b"the same again " * 50)
        writer.finish()
        file = disk.open("/chunk")
        seeds.append(file.pread(file.size(), 0))
    return seeds


def _container(data: bytes) -> bool:
    accepted = False
    head = data[: HEADER_BYTES - 4]
    for content in (data, head + struct.pack("<I", google_crc32c.value(head)) + data[HEADER_BYTES:]):
        disk = SimulatedDisk()
        disk.put_atomically("/chunk", content)
        with contextlib.suppress(CorruptionError, UnsupportedVersion, Invalid, KeyMissing):
            chunk = open_chunk(disk, "/chunk")
            try:
                assert len(chunk.read(0, chunk.size)) == chunk.size
            finally:
                chunk.close()
            accepted = True
    return accepted


FILE_TARGETS: dict[str, tuple[Callable[[], list[bytes]], Callable[[bytes], bool]]] = {
    "partition_snapshot": (_snapshot_seeds, _snapshot),
    "backup_listing": (_listing_seeds, _listing),
    "member_message": (_member_seeds, _member),
    "time_note": (_note_seeds, _note),
    "container": (_container_seeds, _container),
}
