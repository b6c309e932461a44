"""Sections by reference: files built outside the store, and the owner's steps before the journal names them.

A bulk load stages files under reserved ids, in the folder of their shard, and passes their sizes and hashes. The
owner checks both, syncs the files, and only then proposes a record that refers to them. A staged file has a row in the
manifest with a time after which it may be purged; adoption turns that row into a listed file.

Thread: any; `_lock` guards `_named`, `_claimed`, `_writing` and `_purging`.
Invariants: (1) a journal record names only files that are whole, synced and listed as staged. (2) a staged file is
purged only when its row is still staged, its lease is over, and no record, spill or running commit names it. Recovery
names the files of the journal's records; a shard that is opened, those of its spill. (3) the rows of a staged file are
written once: a queue deletes the file when it has stored them, and a second record would name a file that is gone. (4)
a file that a commit names is not written to any more.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.arguments import seconds, whole
from penstock.errors import Backpressure, CorruptionError, Invalid, OutcomeUnknown, PenstockError
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_operations import make_dirs, remove_file, rename_durably
from penstock.host.files import FileSystem
from penstock.journal.partitions import table_of
from penstock.journal.record import REFERENCE, Section, decode, group_count
from penstock.lsm.writer import index_path
from penstock.manifest.keys import ChunkKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import ChunkEntryRecord

READ_BYTES = 1 << 20
STAGED_MAX = 10_000  # files in one call
LEASE_S_MAX = 1e9
FETCHED = "fetched"  # the folder of files that a member has, of records that are not committed yet
TAKEN_OVER_MS = 3_600_000  # until a file that another member staged may be purged, if no record names it


class StagedFile(msgspec.Struct, frozen=True, array_like=True):
    """A staged file. Its builder fills in `size_bytes` and `digest` when it is built.

    >>> [file] = store.stage("users", lease_s=600)  # build it with any tool, then `batch.adopt`; or use `store.load`
    >>> file.size_bytes
    0
    """

    chunk_id: int
    file_name: str  # relative to the store; an sstable has its index beside it
    size_bytes: int = 0
    digest: bytes = b""  # SHA-256 over the file, and its index if it has one


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """The files that a section holds instead of rows."""

    files: tuple[StagedFile, ...]

    def __len__(self) -> int:
        return len(self.files)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Reference)


def encode_reference(reference: Reference) -> bytes:
    """Encode a reference as a section's payload."""
    return _encode(reference)


def decode_reference(payload: bytes) -> Reference:
    """Decode the files a section refers to."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("reference", 0, f"it does not decode ({error})") from None


def references_of(body: bytes) -> tuple[StagedFile, ...]:
    """Return the files that a record of the journal refers to. A group with files has its record to itself."""
    if group_count(body) != 1:
        return ()
    sections = (section for group in decode(body).groups for section in group.sections)
    return tuple(
        file
        for section in sections
        if section.header.form == REFERENCE
        for file in decode_reference(section.payload).files
    )


def plain_files(files: Sequence[StagedFile]) -> tuple[StagedFile, ...]:
    """Return the files as the journal will store them, each once; `Invalid` if they cannot be encoded."""
    try:
        return decode_reference(encode_reference(Reference(tuple(dict.fromkeys(files))))).files
    except (TypeError, ValueError, OverflowError, CorruptionError) as error:
        raise Invalid(f"give files as `stage` and `sealed` returned them ({error})") from None


def check_staging(count: Any, lease_s: Any) -> tuple[int, float]:
    """Check and return how many files to stage, and for how long."""
    return whole(count, "how many files are staged", 1, STAGED_MAX), seconds(
        lease_s, "lease_s", LEASE_S_MAX, above_zero=True
    )


def sealed(fs: FileSystem, root: str, staged: StagedFile) -> StagedFile:
    """Return a built file with its size and hash, for its builder to commit."""
    size, digest = _measure(fs, root, staged.file_name)
    return msgspec.structs.replace(staged, size_bytes=size, digest=digest)


def check_intact(fs: FileSystem, root: str, staged: StagedFile) -> None:
    """Raise `CorruptionError` if a file that a record names has changed since the record was written."""
    path = f"{root}/{staged.file_name}"
    try:
        measured = _measure(fs, root, staged.file_name)
    except FileNotFoundError:
        raise CorruptionError(path, 0, "a record of the journal names this file, and it is missing") from None
    if measured != (staged.size_bytes, staged.digest):
        raise CorruptionError(path, 0, "it does not have the size and hash that the journal names")


def _measure(fs: FileSystem, root: str, file_name: str) -> tuple[int, bytes]:
    digest, size = hashlib.sha256(), 0
    for name in files_of(file_name):
        file = fs.open(f"{root}/{name}")
        try:
            offset = 0
            while data := file.pread(READ_BYTES, offset):
                digest.update(data)
                offset += len(data)
            size += offset
        finally:
            file.close()
    return size, digest.digest()


def files_of(file_name: str) -> tuple[str, ...]:
    """Return a staged file's name, and that of its index if it is an sstable."""
    return (file_name, index_path(file_name)) if file_name.endswith(".sst") else (file_name,)


def fetched_path(name: str) -> str:
    """Return where a member keeps a file of a record that is not committed yet."""
    return f"{FETCHED}/{name.replace('/', '-')}"


class Staging:
    """The staged files of a store."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        fs: FileSystem,
        root: str,
        clock: Clock,
        open_shards: Callable[[int], bool] = lambda table: True,
        remove: Callable[[FileSystem, str], bool] = remove_file,
    ) -> None:
        """`open_shards` opens the shards of a table, which names what they spilled; False if that fails.

        `remove` unlinks a file, or leaves it to be unlinked after a backup.
        """
        self._manifest = manifest
        self._open_shards = open_shards
        self.fs = fs
        self._remove = remove
        self.root = root
        self._clock = clock
        self.next_id: Callable[[], int] = lambda: int(manifest.reserve_chunk_id())  # of a cluster: new to all members
        self._lock = threads.lock("partition.staging")
        # Guarded by _lock: by id, how many records and running commits name a file. Two commits may name one file, and
        # the one that is refused must not end the protection of the other.
        self._named: Counter[int] = Counter()
        # Guarded by _lock: by id, the condition (token and the ledger's) under which a group writes the rows of a file.
        # A group with the same condition is a repetition, which the ledger finds; b"" has none.
        self._claimed: dict[int, bytes] = {}
        self._writing: set[int] = set()  # guarded by _lock: ids whose files are being written
        self._purging: set[int] = set()  # guarded by _lock: ids that are being deleted

    def reserve(self, table: int, folder: str, suffix: str, count: int, lease_s: float) -> list[StagedFile]:
        """Reserve names for files to be built, for `lease_s` seconds and for as long as a commit names them."""
        count, lease_s = check_staging(count, lease_s)
        make_dirs(self.fs, f"{self.root}/{folder}")
        purge_after_ms = self._clock.time_us() // 1_000 + int(lease_s * 1_000)
        staged: list[StagedFile] = []
        txn = self._manifest.begin_write()
        for _ in range(count):
            chunk_id = self.next_id()
            file_name = f"{folder}/{chunk_id:020d}{suffix}"
            row = ChunkEntryRecord(file_name, 0, 0, purge_after_epoch_ms=purge_after_ms, staged=True)
            txn.upsert_chunk(ChunkKey(table, chunk_id), row)
            staged.append(StagedFile(chunk_id, file_name))
        txn.commit()
        return staged

    def write(self, table: int, chunk_id: int, file_name: str, offset: int, data: bytes) -> None:
        """Write bytes of a staged file before its commit; `Invalid` if it is not staged or the bytes leave a gap.

        One at a time: a write that hangs while its client sends the file again must not delete what was committed
        meanwhile. `Backpressure` for the others.
        """
        row = self._manifest.get_chunk(ChunkKey(table, chunk_id))
        with self._lock:
            if row is None or not row.staged or chunk_id in self._named or file_name not in files_of(row.file_name):
                raise Invalid(f"{file_name} is not staged (any more): stage and build it again")
            self._check_written([chunk_id])
            self._writing.add(chunk_id)
        try:
            self._write(file_name, offset, data)
        finally:
            with self._lock:
                self._writing.discard(chunk_id)

    def _check_written(self, chunk_ids: Iterable[int]) -> None:
        """Raise `Backpressure` while a file is being written. Requires: the caller holds _lock."""
        if not self._writing.isdisjoint(chunk_ids):
            raise Backpressure("another request is still writing a file of this load: try again later")

    def _write(self, file_name: str, offset: int, data: bytes) -> None:
        path = f"{self.root}/{file_name}"
        if offset == 0 and self.fs.exists(path):
            self.fs.unlink(path)  # it is being sent again
        file = self.fs.create(path) if offset == 0 else self.fs.open(path, write=True)
        try:
            if not 0 <= offset <= file.size():
                raise Invalid(f"{file_name} has {file.size()} bytes: the next come there, not at {offset}")
            file.pwrite(data, offset)
        finally:
            file.close()

    def accept(self, table: int, files: Sequence[StagedFile]) -> Reference:
        """Check files and sync them, before a record names them; `Invalid` if one differs from its size and hash."""
        files = plain_files(files)
        with self._lock:  # before the check: they must not be written or purged meanwhile
            self._check_written(file.chunk_id for file in files)
            self._named.update(file.chunk_id for file in files)
        try:
            for file in files:
                row = self._manifest.get_chunk(ChunkKey(table, file.chunk_id))
                with self._lock:
                    purging = file.chunk_id in self._purging
                if row is None or not row.staged or purging or row.file_name != file.file_name:
                    raise Invalid(f"{file.file_name} is not staged (any more): stage and build it again")
            for file in files:
                if not self.fs.exists(f"{self.root}/{file.file_name}"):
                    raise Invalid(f"{file.file_name} was not built: build it, then commit")
                if _measure(self.fs, self.root, file.file_name) != (file.size_bytes, file.digest):
                    raise Invalid(
                        f"{file.file_name} does not have the size and hash that were handed in: build it again"
                    )
                self._sync(file.file_name)
        except BaseException:
            self.release(file.chunk_id for file in files)
            raise
        return Reference(tuple(files))

    def _sync(self, file_name: str) -> None:
        for name in files_of(file_name):
            file = self.fs.open(f"{self.root}/{name}", write=True)
            try:
                file.fsync()
            finally:
                file.close()
        self.fs.fsync_dir(f"{self.root}/{file_name.rsplit('/', 1)[0]}")

    def release(self, chunk_ids: Iterable[int]) -> None:
        """End the protection of files that no commit names any more."""
        with self._lock:
            self._named -= Counter(chunk_ids)  # drops what nothing names any more

    @contextmanager
    def claimed(self, chunk_ids: Sequence[int], condition: bytes) -> Iterator[None]:
        """Let the group that the block submits write the rows of files; `Invalid` if another group did, or may have.

        If the group is refused, the files are free again.
        """
        with self._lock:
            for chunk_id in chunk_ids:
                if chunk_id in self._claimed and (not condition or self._claimed[chunk_id] != condition):
                    raise Invalid(
                        "these rows were committed before, or an earlier commit of them may still happen: prepare them "
                        "again, or give batches that may be repeated a token"
                    )
            new = [chunk_id for chunk_id in chunk_ids if chunk_id not in self._claimed]
            self._claimed.update(dict.fromkeys(new, condition))
        try:
            yield
        except OutcomeUnknown:
            raise
        except PenstockError:
            self.unclaim(new)
            raise

    def unclaim(self, chunk_ids: Iterable[int]) -> None:
        """Let another group write the rows of files, because the one that claimed them never will."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._claimed.pop(chunk_id, None)

    def take_over(self, sections: Iterable[Section]) -> None:
        """Stage the files of a record that another member, or this store in a copy, wrote; see `FETCHED`.

        What was applied here already has a row, or no file any more: nothing is done for it.
        """
        for section in sections:
            if section.header.form == REFERENCE:
                for file in decode_reference(section.payload).files:
                    self._take_over(table_of(section.header.partition), file)

    def _take_over(self, table: int, file: StagedFile) -> None:
        key, names = ChunkKey(table, file.chunk_id), files_of(file.file_name)
        fetched = [name for name in names if self.fs.exists(f"{self.root}/{fetched_path(name)}")]
        if fetched:
            make_dirs(self.fs, f"{self.root}/{file.file_name.rpartition('/')[0]}")
        for name in fetched:
            rename_durably(self.fs, f"{self.root}/{fetched_path(name)}", f"{self.root}/{name}")
        if self._manifest.get_chunk(key) is None and self.fs.exists(f"{self.root}/{file.file_name}"):
            purge_after_ms = self._clock.time_us() // 1_000 + TAKEN_OVER_MS
            row = ChunkEntryRecord(file.file_name, 0, 0, purge_after_epoch_ms=purge_after_ms, staged=True)
            txn = self._manifest.begin_write()
            txn.upsert_chunk(key, row)
            txn.commit()

    def name_all(self, sections: Iterable[Section]) -> None:
        """Protect the files that sections of a replayed or spilled record refer to, whatever its verdict."""
        for section in sections:
            if section.header.form == REFERENCE:
                chunk_ids = [file.chunk_id for file in decode_reference(section.payload).files]
                with self._lock:
                    self._named.update(chunk_ids)
                    self._claimed.update(dict.fromkeys(chunk_ids, b""))

    def purge(self, tables: Iterable[int]) -> int:
        """Delete staged files whose lease is over and that nothing names; return their number."""
        now_ms, purged = self._clock.time_us() // 1_000, 0
        for table in tables:
            stale = [
                StagedFile(key.chunk_id, row.file_name)
                for key, row in self._manifest.scan_chunks(table)
                if row.staged and (row.purge_after_epoch_ms or 0) <= now_ms
            ]
            if stale and self._open_shards(table):  # before the names are read: spills may name these files
                purged += sum(self._purge_file(table, file) for file in stale)
        return purged

    def _purge_file(self, table: int, file: StagedFile) -> bool:
        with self._lock:  # a commit that names the file from now on finds that it is being deleted
            if file.chunk_id in self._named:
                return False
            self._purging.add(file.chunk_id)
        try:
            self.discard(table, [file])
        finally:
            with self._lock:
                self._purging.discard(file.chunk_id)
        return True

    def discard(self, table: int, files: Sequence[StagedFile]) -> None:
        """Delete staged files, then their rows. A row left by a crash or a failed delete is purged later."""
        deleted: list[StagedFile] = []
        for file in files:
            removed = [self._remove(self.fs, f"{self.root}/{name}") for name in files_of(file.file_name)]
            if all(removed):
                deleted.append(file)
        for folder in {file.file_name.rpartition("/")[0] for file in deleted}:
            self.fs.fsync_dir(f"{self.root}/{folder}")  # before the rows: a file without a row is never found
        txn = self._manifest.begin_write()
        for file in deleted:
            txn.delete_chunk(ChunkKey(table, file.chunk_id))
        txn.commit()
