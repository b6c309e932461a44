"""The queue's manifest: golden bytes from the format's table, every row of the tables of crashes and errors."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import (
    DiskFull,
    Invalid,
    ManifestCorrupted,
    ManifestNotFound,
    UnsupportedManifestVersion,
    UnsupportedVersion,
)
from penstock.queue import ActiveFileState, FileEntry, FileTable, QmftManifest, QmftWriter
from penstock.testing import Fault, SimulatedDisk

GOLDEN = Path(__file__).parents[2] / "golden" / "queue" / "manifest.1"
FOLDER = "/q"

MANIFEST = QmftManifest(
    next_sequence=0x0102030405060708,
    active_file=ActiveFileState(7, 4096, 12, "2026/01/22/0000000007.data"),
    files=FileTable.of(
        [
            FileEntry("2026/01/21/0000000005.data", 101, 200, 65536),
            FileEntry("2026/01/22/ä.data", 201, 201, 99),
        ]
    ),
)


def by_hand() -> bytes:
    """Field by field as the format's table has them; nothing of the code under test."""
    active_path = b"2026/01/22/0000000007.data"
    first_path = b"2026/01/21/0000000005.data"
    second_path = b"2026/01/22/\xc3\xa4.data"
    before = b"QMFT"  # magic
    before += b"\x01\x00\x00\x00"  # version
    before += b"\x08\x07\x06\x05\x04\x03\x02\x01"  # next_seq
    before += b"\x02\x00\x00\x00"  # file_count
    after = b"\x00\x00\x00\x00\x00\x00\x00\x00"  # reserved
    after += b"\x07\x00\x00\x00"  # file_seq
    after += b"\x00\x10\x00\x00\x00\x00\x00\x00"  # write_pos
    after += b"\x0c\x00\x00\x00\x00\x00\x00\x00"  # msg_count
    after += b"\x1a\x00" + active_path
    after += b"\x65\x00\x00\x00\x00\x00\x00\x00"  # start_seq
    after += b"\xc8\x00\x00\x00\x00\x00\x00\x00"  # end_seq
    after += b"\x00\x00\x01\x00\x00\x00\x00\x00"  # size
    after += b"\x1a\x00" + first_path
    after += b"\xc9\x00\x00\x00\x00\x00\x00\x00"
    after += b"\xc9\x00\x00\x00\x00\x00\x00\x00"
    after += b"\x63\x00\x00\x00\x00\x00\x00\x00"
    after += b"\x12\x00" + second_path
    checksum = zlib.crc32(before + b"\x00\x00\x00\x00" + after)
    return before + struct.pack("<I", checksum) + after


def test_golden_bytes_are_written_and_read() -> None:
    assert MANIFEST.encode() == by_hand() == GOLDEN.read_bytes()
    assert QmftManifest.decode(by_hand()) == MANIFEST
    assert list(QmftManifest.decode(GOLDEN.read_bytes()).files) == list(MANIFEST.files)
    assert by_hand()[:4] == struct.pack(">I", 0x514D4654)


def test_every_flipped_bit_is_told() -> None:
    data = by_hand()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ManifestCorrupted):
            QmftManifest.decode(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(ManifestCorrupted):
            QmftManifest.decode(data[:length])
    with pytest.raises(ManifestCorrupted):
        QmftManifest.decode(data + b"\0")


def resealed(data: bytes) -> bytes:
    zeroed = data[:20] + bytes(4) + data[24:]
    return data[:20] + struct.pack("<I", zlib.crc32(zeroed)) + data[24:]


def test_other_version_is_refused_with_its_number() -> None:
    for version in (0, 2, 1 << 31):
        with pytest.raises(UnsupportedManifestVersion, match=str(version)) as caught:
            QmftManifest.decode(resealed(b"QMFT" + struct.pack("<I", version) + by_hand()[8:]))
        assert isinstance(caught.value, UnsupportedVersion)


@pytest.mark.parametrize(
    ("start", "data"),
    [
        (16, struct.pack("<I", 3)),  # one file more than there is
        (16, struct.pack("<I", 1)),  # one less
        (80, struct.pack("<Q", 300)),  # the first file begins after its end
        (104, struct.pack("<H", 27)),  # a path that is longer by one
        (54, b"/026"),  # a path that leads out of the folder
        (54, b"../6"),
        (54, b"\xff"),  # no UTF-8
    ],
)
def test_sealed_nonsense_is_corrupted(start: int, data: bytes) -> None:
    content = by_hand()
    with pytest.raises(ManifestCorrupted):
        QmftManifest.decode(resealed(content[:start] + data + content[start + len(data) :]))


def test_a_table_of_files_is_columns_and_entries() -> None:
    equal = [FileEntry(f"2026/01/22/{n:010d}.data", n * 10 + 1, n * 10 + 10, n) for n in range(100)]
    mixed = [FileEntry("x" * (n % 7 + 1), n * 10 + 1, n * 10 + 10, n) for n in range(100)]
    for entries in (equal, mixed, equal[:1], []):
        original = FileTable.of(entries)
        table = FileTable.decode(original.encode(), len(entries))
        grown = FileTable()
        for entry in entries:
            grown = grown.with_file(entry)
        assert list(table) == list(original) == list(grown) == entries
        assert table == original == grown
        assert hash(table) == hash(original)
        assert list(table.without_oldest(40)) == entries[40:]
        assert np.array_equal(table.starts, [entry.start_sequence for entry in entries])
    table = FileTable.of(mixed)
    assert [table.index_of(s) for s in (0, 1, 10, 11, 1000, 1001)] == [0, 0, 0, 1, 99, 100]
    with pytest.raises(Invalid):
        FileEntry("a", 2, 1, 0)
    with pytest.raises(Invalid):
        FileEntry("a/../../b", 1, 1, 0)


# -- the folder


def folder() -> tuple[SimulatedDisk, QmftWriter]:
    disk = SimulatedDisk()
    disk.mkdir(FOLDER)
    return disk, QmftWriter(disk, FOLDER)


def numbered(number: int) -> QmftManifest:
    return QmftManifest(number, ActiveFileState(number, 0, 0, ""), FileTable())


def content(disk: SimulatedDisk, name: str) -> bytes:
    file = disk.open(f"{FOLDER}/{name}")
    return file.pread(file.size(), 0)


def put(disk: SimulatedDisk, name: str, data: bytes) -> None:
    path = f"{FOLDER}/{name}"
    if disk.exists(path):
        disk.unlink(path)
    for index, letter in enumerate(path):
        if letter == "/" and index:
            disk.mkdir(path[:index])
    disk.create(path).pwrite(data, 0)


def test_first_startup_has_no_manifest_and_writes_one_without_files() -> None:
    disk, writer = folder()
    assert writer.read_latest() is None
    writer.write(QmftManifest.fresh())
    manifest = QmftWriter(disk, FOLDER).read_latest()
    assert manifest == QmftManifest.fresh()
    assert struct.unpack_from("<I", content(disk, "manifest.1"), 16) == (0,)


def test_slots_are_written_alternately_and_the_pointer_in_place() -> None:
    disk, writer = folder()
    for number in range(1, 8):
        writer.write(numbered(number))
        slot = 1 + (number - 1) % 2
        assert content(disk, "manifest.current") == bytes([slot])
        assert content(disk, f"manifest.{slot}") == numbered(number).encode()
        if number > 1:
            assert content(disk, f"manifest.{3 - slot}") == numbered(number - 1).encode()
        assert sorted(disk.listdir(FOLDER)) == ["manifest.1", *["manifest.2"][: number - 1], "manifest.current"]
        assert QmftWriter(disk, FOLDER).read_latest() == numbered(number)


def test_the_seven_steps() -> None:
    disk, writer = folder()
    writer.write(numbered(1))
    writer.write(numbered(2))
    disk.on_image = lambda: 0
    writer.write(numbered(3))
    assert [image.label for image in disk.images] == [
        "pwrite /q/manifest.1",
        "truncate /q/manifest.1",
        "fsync /q/manifest.1",
        "pwrite /q/manifest.current",
        "fsync /q/manifest.current",
    ]


def test_a_shorter_manifest_leaves_nothing_of_a_longer_one() -> None:
    disk, writer = folder()
    for manifest in (MANIFEST, numbered(2), numbered(3)):
        writer.write(manifest)
    assert content(disk, "manifest.1") == numbered(3).encode()


# The rows of the crash table: the current slot is 1, the write goes to 2.
ROWS: list[tuple[str, str, str, set[int]]] = [
    ("during step 4", "fsync /q/manifest.2", "torn", {1}),
    ("after 5, before 6", "pwrite /q/manifest.current", "kept", {1}),
    ("after 6, before 7", "fsync /q/manifest.current", "torn", {1, 3}),
    ("after 6, before 7", "fsync /q/manifest.current", "strict", {1}),
    ("after 6, before 7", "fsync /q/manifest.current", "kept", {3}),
    ("after step 7", "end", "strict", {3}),
]


@pytest.mark.parametrize(("row", "label", "mode", "allowed"), ROWS)
def test_row_of_the_crash_table(row: str, label: str, mode: str, allowed: set[int]) -> None:
    disk, writer = folder()
    disk.fsync_dir("/")
    for number in (0, 0, 1):
        writer.write(numbered(number))  # 1 is in slot 1
    disk.on_image = lambda: 0
    writer.write(numbered(3))
    images = {image.label: image for image in [*disk.images, disk.image()]}
    next_sequences = set()
    for seed in range(20):
        after = images[label].restore(mode, seed)  # type: ignore[arg-type]
        manifest = QmftWriter(after, FOLDER).read_latest()
        assert manifest is not None
        next_sequences.add(manifest.next_sequence)
        again = QmftWriter(after, FOLDER)
        again.read_latest()
        again.write(numbered(9))
        assert QmftWriter(after.image().restore("strict"), FOLDER).read_latest() == numbered(9)
    assert next_sequences <= allowed, row
    if label != "fsync /q/manifest.2":  # there the slot may be anything, and the other one counts
        assert next_sequences == allowed


# -- the rows of the error table, and the pointer


def with_data(disk: SimulatedDisk) -> None:
    put(disk, "2026/01/22/0000000001.data", b"data")


def everything(disk: SimulatedDisk) -> dict[int, tuple[bytes, object]]:
    return {number: (bytes(inode.live), tuple(inode.changes)) for number, inode in disk._inodes.items()}


def spoil(disk: SimulatedDisk, slot: bytes, pointer: bytes | None) -> None:
    put(disk, "manifest.1", slot)
    if pointer is not None:
        put(disk, "manifest.current", pointer)
    with_data(disk)


@pytest.mark.parametrize(
    ("slot", "pointer", "error", "names"),
    [
        (by_hand(), None, ManifestNotFound, "manifest.current"),
        (by_hand(), b"", ManifestCorrupted, "manifest.current"),
        (by_hand(), b"\x00", ManifestCorrupted, "manifest.current"),
        (by_hand(), b"\x03", ManifestCorrupted, "manifest.current"),
        (by_hand(), b"1", ManifestCorrupted, "manifest.current"),
        (by_hand(), b"\x01\x01", ManifestCorrupted, "manifest.current"),
        (by_hand(), b"\x02", ManifestNotFound, "manifest.2"),
        (by_hand()[:-1], b"\x01", ManifestCorrupted, "manifest.1"),
        (b"", b"\x01", ManifestCorrupted, "manifest.1"),
        (b"QMFT" + b"\x02" + by_hand()[5:], b"\x01", ManifestCorrupted, "manifest.1"),
        (resealed(b"QMFT" + b"\x02" + by_hand()[5:]), b"\x01", UnsupportedManifestVersion, "manifest.1"),
    ],
)
def test_no_sound_manifest_is_an_error_and_changes_nothing(
    slot: bytes, pointer: bytes | None, error: type[Exception], names: str
) -> None:
    disk, writer = folder()
    spoil(disk, slot, pointer)
    before = everything(disk)
    with pytest.raises(error, match=names):
        writer.read_latest()
    assert everything(disk) == before


def test_there_is_no_fall_back_to_the_other_slot() -> None:
    disk, writer = folder()
    writer.write(numbered(1))
    writer.write(numbered(2))
    disk.flip(f"{FOLDER}/manifest.2", 99)
    with pytest.raises(ManifestCorrupted, match=r"manifest\.2"):
        QmftWriter(disk, FOLDER).read_latest()


def test_only_a_missing_pointer_makes_it_look_for_data_files() -> None:
    disk, writer = folder()
    writer.write(numbered(1))
    listed: list[str] = []
    listdir = disk.listdir

    def spy(path: str) -> list[str]:
        listed.append(path)
        return listdir(path)

    disk.listdir = spy  # type: ignore[method-assign]
    QmftWriter(disk, FOLDER).read_latest()
    assert listed == []
    with_data(disk)
    disk.unlink(f"{FOLDER}/manifest.current")
    with pytest.raises(ManifestNotFound):
        QmftWriter(disk, FOLDER).read_latest()
    assert listed == [FOLDER, f"{FOLDER}/2026", f"{FOLDER}/2026/01", f"{FOLDER}/2026/01/22"]


@pytest.mark.parametrize(
    "name", ["2026/01/22/x.txt", "2026/01/x.data", "20260/01/22/1.data", "x.data", "2026/1/22/1.data"]
)
def test_other_files_are_no_data_files(name: str) -> None:
    disk, writer = folder()
    put(disk, name, b"")
    assert writer.read_latest() is None


def writes_until_failure(disk: SimulatedDisk) -> tuple[QmftWriter, int]:
    writer = QmftWriter(disk, FOLDER)
    for number in range(9):  # a fault at a read may pass unseen
        try:
            writer.write(numbered(number + 1))
        except (OSError, DiskFull):
            break
    return writer, number


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_after_a_failure_the_old_one_counts_and_the_next_write_is_whole(kind: str) -> None:
    def attempt(at: int) -> SimulatedDisk:
        disk = SimulatedDisk(faults=(Fault(at, kind),))  # type: ignore[arg-type]
        disk.mkdir(FOLDER)
        disk.fsync_dir("/")
        return disk

    for at in range(12, 30):  # the third write and later
        disk = attempt(at)
        writer, number = writes_until_failure(disk)
        writer.write(numbered(77))
        for later in (78, 79):
            for mode in ("strict", "torn", "kept", "restart"):
                after = disk.image().restore(mode)
                assert QmftWriter(after, FOLDER).read_latest() == numbered(later - 1), (at, mode, number)
            writer.write(numbered(later))


def test_disk_full_in_the_slot_changes_nothing() -> None:
    disk, writer = folder()
    writer.write(numbered(1))
    writer.write(numbered(2))
    disk.capacity_bytes = 1
    big = FileTable.of([FileEntry("x" * 500, 1, 2, 3)])
    with pytest.raises(DiskFull):
        writer.write(QmftManifest(5, ActiveFileState(0, 0, 0, ""), big))
    disk.capacity_bytes = None
    assert QmftWriter(disk, FOLDER).read_latest() == numbered(2)
    writer.write(numbered(3))
    assert QmftWriter(disk, FOLDER).read_latest() == numbered(3)
