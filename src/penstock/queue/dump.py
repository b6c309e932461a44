"""A look into a queue's folder, for people: its manifest, its records, and what does not read.

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
from penstock.queue.files import KIND_MESSAGES, OPENING_BYTES, DataReader
from penstock.queue.messages import MessageBatch, decode_batch
from penstock.queue.qmft import QmftManifest, QmftWriter


@dataclass(frozen=True, slots=True)
class DumpedFile:
    """A data file that the manifest lists."""

    path: str
    first: int
    next: int  # by the manifest
    size: int  # of what counts, by the manifest
    active: bool


def listed_files(manifest: QmftManifest) -> Iterator[DumpedFile]:
    """The files of a manifest, oldest first."""
    for entry in manifest.files:
        yield DumpedFile(entry.path, entry.start_sequence, entry.end_sequence + 1, entry.size, False)
    active = manifest.active_file
    if active.path:
        first = manifest.next_sequence - active.message_count
        yield DumpedFile(active.path, first, manifest.next_sequence, active.write_position, True)


def dump_file(
    fs: FileSystem, folder: str, file: DumpedFile, *, past_damage: bool = False
) -> Iterator[tuple[int, MessageBatch | CorruptionError]]:
    """Offset and batch of each record, and each place that does not read; what follows such a place only on request.

    The active file is read to its end: behind the write position stands what was written since the manifest.
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
                yield offset, decode_batch(record, path=reader.file.path, offset=offset)
    except CorruptionError:
        pass  # it is in `damage`
    finally:
        reader.file.close()
    for bad in damage:
        if bad.offset < file.size or _written(reader.file.path, fs, bad.offset):
            yield bad.offset, bad


def _written(path: str, fs: FileSystem, offset: int) -> bool:
    """Whether anything but zero-filled room follows."""
    file = fs.open(path)
    try:
        return any(file.pread(file.size() - offset, offset))
    finally:
        file.close()


def dump(fs: FileSystem, folder: str, *, past_damage: bool = False) -> Iterator[str]:
    """The lines of a dump. Those about damage begin with `DAMAGED`."""
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
        for offset, found in dump_file(fs, folder, file, past_damage=past_damage):
            if isinstance(found, CorruptionError):
                yield f"  DAMAGED {offset:>10}  {found.reason}"
                continue
            note = " (since the manifest)" if offset >= file.size else ""
            when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=found.time_us)
            size = found.messages.size_bytes()
            yield (
                f"  {offset:>10}  {found.first} to {found.next - 1}, LSN {found.lsn}, {when:%Y-%m-%dT%H:%M:%S.%fZ}, "
                f"{size} bytes{note}"
            )


def main(arguments: Sequence[str] | None = None, *, fs: FileSystem | None = None) -> int:
    """The command; 0 if all reads, 1 if something is damaged."""
    parser = argparse.ArgumentParser(prog="python -m penstock.queue.dump", description="Print a queue's folder.")
    parser.add_argument("folder")
    parser.add_argument("--past-damage", action="store_true", help="go on behind a record that does not read")
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
