"""Prints a queue's folder for people: its manifest, its records, and damage.

    python -m penstock.queue.dump FOLDER [--past-damage]

Thread: any; nothing on disk is changed, and the store need not be open.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock.errors import CorruptionError, PenstockError
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.queue.coding import PLAIN_CODING
from penstock.queue.files import KIND_MESSAGES, OPENING_BYTES, DataReader
from penstock.queue.messages import MessageBatch, decode_batch
from penstock.queue.qmft import QmftManifest, QmftWriter


@dataclass(frozen=True, slots=True)
class DumpedFile:
    """A data file that the manifest lists."""

    path: str
    first: int
    next: int  # according to the manifest
    size: int  # valid bytes, according to the manifest
    active: bool


def listed_files(manifest: QmftManifest) -> Iterator[DumpedFile]:
    """Yield the files of a manifest, oldest first."""
    for entry in manifest.files:
        yield DumpedFile(entry.path, entry.start_sequence, entry.end_sequence + 1, entry.size, False)
    active = manifest.active_file
    if active.path:
        first = manifest.next_sequence - active.message_count
        yield DumpedFile(active.path, first, manifest.next_sequence, active.write_position, True)


def dump_file(
    fs: FileSystem, folder: str, file: DumpedFile, *, past_damage: bool = False
) -> Iterator[tuple[int, MessageBatch | CorruptionError]]:
    """Yield (offset, batch) of each record, or (offset, error) of damage; stop there unless `past_damage`.

    The active file is read to its end, past the manifest's write position.
    """
    try:
        reader = DataReader.open(fs, folder, file.path, None)
    except FileNotFoundError:
        yield 0, CorruptionError(f"{folder}/{file.path}", 0, "the file is missing")
        return
    except CorruptionError as error:
        yield 0, error
        return
    size = reader.file.size()
    end = size if file.active else file.size
    damage: list[CorruptionError] = []
    try:
        for offset, record in reader.records(OPENING_BYTES, end, past_damage=past_damage, damage=damage):
            yield from ((bad.offset, bad) for bad in damage)
            damage.clear()
            if record.kind == KIND_MESSAGES:
                yield offset, decode_batch(record, path=reader.file.path, offset=offset, coding=PLAIN_CODING)
    except CorruptionError:
        pass  # it is in `damage`
    finally:
        reader.file.close()
    for bad in damage:
        if bad.offset < file.size or _written(reader.file.path, fs, bad.offset):
            yield bad.offset, bad


def _written(path: str, fs: FileSystem, offset: int) -> bool:
    """Whether any byte from `offset` on is not zero."""
    file = fs.open(path)
    try:
        return any(file.pread(file.size() - offset, offset))
    finally:
        file.close()


def dump(fs: FileSystem, folder: str, *, past_damage: bool = False) -> Iterator[str]:
    """Yield the lines of a dump. Those about damage begin with `DAMAGED`."""
    manifest = QmftWriter(fs, folder).read_latest()
    if manifest is None:
        yield f"{folder}: no queue"
        return
    active = manifest.active_file
    yield f"manifest version {manifest.version}: next sequence {manifest.next_sequence}, {len(manifest.files)} sealed"
    yield (
        f"active file {active.path or '(none)'}: number {active.file_sequence}, "
        f"write position {active.write_position}, {active.message_count} messages"
    )
    for file in listed_files(manifest):
        state = "active" if file.active else "sealed"
        messages = f"messages {file.first} to {file.next - 1}" if file.first < file.next else "no message"
        yield f"{file.path}: {state}, {messages}, {file.size} bytes"
        for offset, item in dump_file(fs, folder, file, past_damage=past_damage):
            if isinstance(item, CorruptionError):
                yield f"  DAMAGED {offset:>10}  {item.reason}"
                continue
            note = " (since the manifest)" if offset >= file.size else ""
            when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=item.time_us)
            size = item.messages.size_bytes()
            yield (
                f"  {offset:>10}  {item.first} to {item.next - 1}, LSN {item.lsn}, {when:%Y-%m-%dT%H:%M:%S.%fZ}, "
                f"{size} bytes{note}"
            )


def main(arguments: Sequence[str] | None = None, *, fs: FileSystem | None = None) -> int:
    """Run the command; return 0 if all is readable, 1 if something is damaged."""
    parser = argparse.ArgumentParser(prog="python -m penstock.queue.dump", description="Print a queue's folder.")
    parser.add_argument("folder")
    parser.add_argument("--past-damage", action="store_true", help="continue after an unreadable record")
    options = parser.parse_args(arguments)
    damaged = False
    try:
        for line in dump(fs or OsFileSystem(), options.folder, past_damage=options.past_damage):
            damaged = damaged or line.lstrip().startswith("DAMAGED")
            print(line)
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 1
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
