"""How a member takes a snapshot of its leader's store: files are fetched beside the old store, and then replace it.

    incoming-<path>   what was fetched so far; a later attempt reuses it where the leader has the same bytes
    incoming-READY    written last: from then on the old store does not count, and the installation is finished at
                      every start before anything is opened

Thread: the member's own.
Invariants: (1) READY names only files that are whole, synced and, for sstables, undamaged. (2) the installation may be
interrupted anywhere and repeated. (3) term and vote of the member stay as they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress

import google_crc32c
import msgspec

from penstock.archive.container import check_blocks
from penstock.errors import Closed, CorruptionError, Invalid
from penstock.host.file_operations import make_dirs, publish, remove_file, remove_folder, walk
from penstock.host.files import File, FileSystem
from penstock.host.paths import parent
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import index_path
from penstock.partition.aside import FOLDER as ASIDE
from penstock.partition.reference import FETCHED
from penstock.replica.file_channel import PIECE_BYTES, FileClient, ShippedFile, SnapshotListing, hash_prefix
from penstock.replica.state import LogBase, StateFile
from penstock.store.following import RAFT_FILE
from penstock.store.identity import StoreIdentity, write_identity
from penstock.store.shipping import OUTGOING

logger = logging.getLogger(__name__)

INCOMING, READY = "incoming-", "incoming-READY"  # beside the old files: a rename stays within its folder
COMPARED_BYTES_MIN = 1 << 16  # smaller files are fetched, not compared
_PATH = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_TOP = ("manifest", "journal", "tables", ASIDE)  # what a snapshot consists of
_SYNC_BYTES = 4


class _Ready(msgspec.Struct, frozen=True, array_like=True):
    identity: bytes
    cluster: bytes
    base: LogBase
    names: tuple[str, ...]  # in the store's folder


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Ready)


class SnapshotTaker:
    """Fetches a snapshot into a member's folder."""

    def __init__(self, fs: FileSystem, root: str, *, stop: Callable[[], bool]) -> None:
        self._fs, self._root, self._stop = fs, root, stop
        self._incoming = f"{root}/{INCOMING}"  # before a path in the store
        self.fetched_bytes = 0
        self.kept_bytes = 0  # of files that were here already

    def fetch(self, client: FileClient) -> SnapshotListing:
        """Fetch every file of a new snapshot that is not here yet."""
        listing = client.snapshot()
        for file in listing.files:
            if not _PATH.fullmatch(file.path) or file.path.split("/", 1)[0] not in _TOP or file.size < 0:
                raise Invalid(f"a member offers a file {file.path!r}, which no snapshot has")
        self._sweep({file.path for file in listing.files})
        folders = {parent(f"{self._incoming}{file.path}") for file in listing.files} | {f"{self._incoming}journal"}
        for folder in sorted(folders):
            make_dirs(self._fs, folder)
        for file in listing.files:
            self._fetch_file(client, file)
        for file in listing.files:
            if file.path.endswith(".sst"):
                self._verify(f"{self._incoming}{file.path}")
        for folder in sorted(folders):
            self._fs.fsync_dir(folder)
        logger.info(
            "a snapshot at record %d was fetched: %d bytes, and %d were here", listing.end.lsn, self.fetched_bytes,
            self.kept_bytes,
        )  # fmt: skip
        return listing

    def _sweep(self, paths: set[str]) -> None:
        """Remove what an earlier attempt fetched and this snapshot does not have."""
        for name in self._fs.listdir(self._root):
            if name.startswith(INCOMING) and name.removeprefix(INCOMING) not in _TOP:
                self._fs.unlink(f"{self._root}/{name}")
        for top in _TOP:
            with suppress(NotADirectoryError):
                for below in list(walk(self._fs, f"{self._incoming}{top}")):
                    if f"{top}/{below}" not in paths:
                        self._fs.unlink(f"{self._incoming}{top}/{below}")

    def _fetch_file(self, client: FileClient, file: ShippedFile) -> None:
        path = f"{self._incoming}{file.path}"
        self._take_own(client, file, path)
        target = self._fs.open(path, write=True) if self._fs.exists(path) else self._fs.create(path)
        try:
            at = self._same_bytes(client, file, target)
            if target.size() != at:
                target.truncate(at)
            self.kept_bytes += at
            while at < file.size:
                if self._stop():
                    raise Closed("this member stops, or another one leads: the snapshot is fetched later")
                data = client.read(file.path, at, min(PIECE_BYTES, file.size - at))
                target.pwrite(data, at)
                at += len(data)
                self.fetched_bytes += len(data)
            target.fsync()
        finally:
            target.close()

    def _take_own(self, client: FileClient, file: ShippedFile, path: str) -> None:
        """Copy a file of the old store, if it is the leader's."""
        own = f"{self._root}/{file.path}"
        if file.size < COMPARED_BYTES_MIN or self._fs.exists(path) or not self._fs.exists(own):
            return
        source = self._fs.open(own)
        try:
            if source.size() != file.size or hash_prefix(source, file.size) != client.hash_prefix(file.path, file.size):
                return
            target = self._fs.create(path)
            try:
                for at in range(0, file.size, PIECE_BYTES):
                    target.pwrite(source.pread(PIECE_BYTES, at), at)
            finally:
                target.close()
        finally:
            source.close()

    def _same_bytes(self, client: FileClient, file: ShippedFile, target: File) -> int:
        """Return how many bytes of an earlier attempt are those of the leader's file: all, or none."""
        have = min(target.size(), file.size)
        if have < COMPARED_BYTES_MIN:
            return 0
        return have if hash_prefix(target, have) == client.hash_prefix(file.path, have) else 0

    def _verify(self, path: str) -> None:
        try:
            # The key of an encrypted table is in the ledger, which is being fetched, too.
            keys = [check_blocks(self._fs, name) for name in (path, index_path(path))]
            if any(keys):
                return
            table = Sstable.open(path, fs=self._fs, key=0)
            damage = table.damaged_pages()
            table.close()
            for error in damage:
                raise error
        except CorruptionError:
            self._fs.unlink(path)  # the next attempt fetches it again
            raise

    def make_ready(self, listing: SnapshotListing, cluster: bytes) -> None:
        """Let the fetched store replace the old one. Requires: the old one is closed, and lacks the snapshot's end."""
        names = sorted({file.path.split("/", 1)[0] for file in listing.files} | {"journal"})
        body = _encode(_Ready(listing.identity, cluster, listing.base, tuple(names)))
        temporary = f"{self._root}/{READY}.new"
        remove_file(self._fs, temporary)
        file = self._fs.create(temporary)
        try:
            file.pwrite(google_crc32c.value(body).to_bytes(_SYNC_BYTES, "little") + body, 0)
            publish(self._fs, file, f"{self._root}/{READY}")
        finally:
            file.close()


def finish_installation(fs: FileSystem, root: str) -> bool:
    """Replace the store by a snapshot that is ready; return whether there was one. Repeated until it succeeds."""
    ready = _read_ready(fs, f"{root}/{READY}")
    if ready is None:
        return False
    for name in fs.listdir(root):
        is_old = name in (*_TOP, FETCHED, OUTGOING) or name.startswith("manifest")
        if is_old and name not in ready.names:
            _remove(fs, f"{root}/{name}")
    for name in ready.names:
        if fs.exists(f"{root}/{INCOMING}{name}"):  # else it was moved before
            _remove(fs, f"{root}/{name}")
            fs.rename(f"{root}/{INCOMING}{name}", f"{root}/{name}")
    fs.fsync_dir(root)
    state = StateFile(fs, f"{root}/{RAFT_FILE}")
    state.save(msgspec.structs.replace(state.state, bases=(ready.base,)))
    write_identity(fs, root, StoreIdentity(ready.identity, ready.cluster))
    fs.unlink(f"{root}/{READY}")
    fs.fsync_dir(root)
    logger.info("%s was replaced by a snapshot; its journal begins after entry %d", root, ready.base.index)
    return True


def _read_ready(fs: FileSystem, path: str) -> _Ready | None:
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    checksum, body = data[:_SYNC_BYTES], data[_SYNC_BYTES:]
    if checksum != google_crc32c.value(body).to_bytes(_SYNC_BYTES, "little"):
        raise CorruptionError(path, 0, "the checksum of a snapshot's end does not match: remove the folder's content")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptionError(path, 0, f"it does not decode ({error})") from None


def _remove(fs: FileSystem, path: str) -> None:
    with suppress(FileNotFoundError):
        try:
            fs.unlink(path)
        except (IsADirectoryError, PermissionError):  # some systems raise the second for a folder
            remove_folder(fs, path)
