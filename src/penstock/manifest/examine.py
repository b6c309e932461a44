"""Look at a doubtful manifest file without trusting it: first its two meta pages, then everything in a child process.

LMDB maps its file and follows page numbers: a damaged one can end the process by a signal, which no exception handler
sees. The child (`python -m penstock.manifest.examine PATH`) walks every row and checks every rule; its death is an
answer.

Thread: the one that opens the manifest, before it is mapped.
"""

from __future__ import annotations

import struct
import subprocess
import sys

import lmdb

from penstock.errors import CorruptionError, PenstockError
from penstock.host.files import FileSystem

EXAMINE_S_MAX = 600.0
UNKNOWN_BOOT = b"unknown"
_SOUND, _DAMAGED = 0, 3

# LMDB 0.9 on 64 bits, after a page header of 16 bytes: magic, version, address, map size, two trees (the first begins
# with the page size), last page, transaction.
_META = struct.Struct("<16xII8x8xI44x48xQQ")
assert _META.size == 152
_MAGIC, _FORMAT = 0xBEEFC0DE, 1


def is_plausible(fs: FileSystem, path: str) -> bool:
    """Whether both meta pages look right and the file is as long as the newer one says. Cheap, and proves nothing."""
    file = fs.open(path)
    try:
        first = file.pread(_META.size, 0)
        if len(first) < _META.size:
            return False
        page_bytes = int(_META.unpack(first)[2])
        if page_bytes not in (512 << n for n in range(8)):
            return False
        second = file.pread(_META.size, page_bytes)
        if len(second) < _META.size:
            return False
        metas = [_META.unpack(first), _META.unpack(second)]
        newest = max(metas, key=lambda meta: int(meta[4]))
        return all(meta[:3] == (_MAGIC, _FORMAT, page_bytes) for meta in metas) and (
            (newest[3] + 1) * page_bytes <= file.size()
        )
    finally:
        file.close()


def examine(path: str) -> None:
    """Walk the whole file in a child process; `CorruptionError` if that fails or dies."""
    command = [sys.executable, "-m", "penstock.manifest.examine", path]
    try:
        child = subprocess.run(command, capture_output=True, timeout=EXAMINE_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise CorruptionError(path, 0, f"examining it took longer than {EXAMINE_S_MAX:.0f} s") from None
    if child.returncode == _SOUND:
        return
    said = child.stdout.decode(errors="replace").strip().splitlines()
    reason = said[-1] if child.returncode == _DAMAGED and said else f"examining it ended with {child.returncode}"
    raise CorruptionError(path, 0, reason)


def boot_id(fs: FileSystem) -> bytes:
    """What names this boot of the machine; `UNKNOWN_BOOT` where the system does not say."""
    path = "/proc/sys/kernel/random/boot_id"
    if not fs.exists(path):
        return UNKNOWN_BOOT
    file = fs.open(path)
    try:
        return file.pread(64, 0).strip()
    finally:
        file.close()


def main(path: str) -> int:
    """The child: 0 if every row decodes and every rule holds."""
    from penstock.manifest.engine import TABLES
    from penstock.manifest.environment import LmdbReadView
    from penstock.manifest.invariants import check_all
    from penstock.manifest.migrations import is_current

    try:
        env = lmdb.open(path, subdir=False, readonly=True, lock=False, create=False, max_dbs=len(TABLES))
        tables = {name: env.open_db(name.encode(), create=False) for name in TABLES}
        with env.begin() as transaction:
            view = LmdbReadView(transaction, tables)
            if not is_current(view):  # other versions cannot be decoded here, but every page can be read
                sum(len(value) for name in TABLES for _, value in view.scan(name))
                return _SOUND
            for broken in check_all(view):
                sys.stdout.write(f"{broken}\n")
                return _DAMAGED
    except (lmdb.Error, PenstockError, OSError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return _DAMAGED
    return _SOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
