"""`penstock keys new|rotate`: master keys of encrypted tables.

Thread: one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.archive.master_keys import KEY_BYTES, format_key, key_versions
from penstock.cli.app import group
from penstock.cli.session import Session, command
from penstock.errors import Backpressure, Invalid, StoreLocked
from penstock.host.file_errors import translate_os_errors
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.private_files import write_new_files
from penstock.host.randomness import system_random

keys_group = group("keys", "Master keys of encrypted tables.")


@keys_group.command()
def new(file: Annotated[Path, typer.Argument(help="a key file, created if absent; only you can read it")]) -> None:
    """Add a random key to a key file; its version is the highest one, so it wraps the keys of new tables."""
    fs = OsFileSystem()
    with translate_os_errors():
        try:
            file = file.resolve()  # a link stays one
        except RuntimeError:
            raise Invalid(f"{file} is a link to itself: give another file") from None
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = fs.lock(f"{file}.lock")  # two processes would add keys with the same version
        except StoreLocked:
            raise Backpressure(f"another process adds a key to {file}: try again") from None
        try:
            version = _add_key(fs, file)
        finally:
            lock.release()
    print(f"master key {version} was added to {file}: keep a copy of it, without it nothing can be decrypted")


def _add_key(fs: FileSystem, file: Path) -> int:
    """Add a random key to a key file, durably; return its version. Requires: the lock."""
    version = max(key_versions(fs, str(file)), default=0) + 1
    before = file.read_text() if file.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    content = before + format_key(version, system_random().randbytes(KEY_BYTES))
    beside = file.with_name(f"{file.name}.new")
    beside.unlink(missing_ok=True)  # of a call that was interrupted
    write_new_files(str(file.parent), [(beside.name, content.encode(), True)])
    beside.replace(file)  # whole, or not at all: it may hold the only copy of a key
    fs.fsync_dir(str(file.parent))  # before anybody is told to use it
    return version


@command(keys_group)
def rotate(session: Session) -> None:
    """Wrap the keys of all encrypted tables with the newest master key of the store's owner."""
    report = session.store.rotate_keys()
    session.out.done(
        f"master key {report.version} wraps every table's key; {len(report.rewrapped)} were wrapped by an older one",
        version=report.version,
        rewrapped=report.rewrapped,
    )
