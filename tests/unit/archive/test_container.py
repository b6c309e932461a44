from __future__ import annotations

import random
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.archive import framed
from penstock.archive.chunk import ChunkIdentity, Codec, Sealing, crc32c
from penstock.archive.container import check_blocks, create_chunk, key_of, open_chunk
from penstock.archive.framed import BLOCK_BYTES, HEADER_BYTES, FramedChunk
from penstock.archive.table_keys import TableKeyRing, lending
from penstock.errors import CorruptionError, Invalid, KeyMissing, NotFound, UnsupportedVersion, WrongKey
from penstock.testing.disk import Fault, SimulatedDisk

STORE = b"only of this file"[:16]
ME = ChunkIdentity(store=STORE, chunk_id=7)


class Keys:
    def __init__(self, current: int = 1, versions: tuple[int, ...] = (1, 2)) -> None:
        self._current = current
        self._versions = versions

    def current(self) -> int:
        return self._current

    def key(self, version: int) -> bytes:
        if version not in self._versions:
            raise NotFound(f"master key {version} was removed")
        return bytes([version]) * 32


def sealing(codec: Codec, encrypted: bool, seed: int = 0) -> Sealing:
    return Sealing(codec=codec, keys=Keys() if encrypted else None, random=random.Random(seed))


ALL = [(codec, encrypted) for codec in ("none", "zstd", "lz4") for encrypted in (False, True)]


def put(
    disk: SimulatedDisk, path: str, content: bytes, how: Sealing, pieces: int = 3, identity: ChunkIdentity = ME
) -> None:
    out = create_chunk(disk, path, identity, how)
    step = max(1, len(content) // pieces)
    for at in range(0, len(content), step):
        out.write(content[at : at + step])
    out.finish()


def content_of(size: int, seed: int = 1) -> bytes:
    chance = random.Random(seed)
    half = size // 2
    return chance.randbytes(half) + b"the same again " * ((size - half) // 15) + b"x" * ((size - half) % 15)


@pytest.mark.parametrize(("codec", "encrypted"), ALL)
@pytest.mark.parametrize("size", [0, 1, 15, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 500_000])
def test_what_is_written_is_read(codec: Codec, encrypted: bool, size: int) -> None:
    disk = SimulatedDisk()
    content = content_of(size)
    put(disk, "/c", content, sealing(codec, encrypted))
    chunk = open_chunk(disk, "/c", Keys())
    assert chunk.size == size
    assert bytes(chunk.read(0, size)) == content
    chance = random.Random(size)
    for _ in range(50):
        a, b = sorted((chance.randint(0, size), chance.randint(0, size)))
        assert bytes(chunk.read(a, b)) == content[a:b]
    with pytest.raises(CorruptionError):
        chunk.read(0, size + 1)
    assert (chunk.view is not None) == (codec == "none" and not encrypted)
    assert disk.listdir("/") == ["c"]


def test_a_plain_chunk_is_its_content() -> None:
    disk = SimulatedDisk()
    put(disk, "/c", b"hello", Sealing())
    assert disk.open("/c").pread(100, 0) == b"hello"


@pytest.mark.parametrize(("codec", "encrypted"), ALL[1:])
def test_a_flipped_bit_is_seen_wherever_it_is(codec: Codec, encrypted: bool) -> None:
    content = content_of(3 * BLOCK_BYTES + 100)
    disk = SimulatedDisk()
    put(disk, "/c", content, sealing(codec, encrypted))
    size = disk.open("/c").size()
    chance = random.Random(5)
    for at in [*range(0, HEADER_BYTES, 3), *chance.sample(range(size), 150), *range(size - 40, size, 3)]:
        bit = at * 8 + chance.randrange(8)
        disk.flip("/c", bit)
        try:
            chunk = open_chunk(disk, "/c", Keys())
            if at < len(framed.MAGIC):
                assert chunk.view is not None  # no container of ours: its content says so to whoever reads it
            else:
                assert bytes(chunk.read(0, chunk.size)) == content
        except (CorruptionError, UnsupportedVersion, NotFound):
            pass
        disk.flip("/c", bit)
    assert bytes(open_chunk(disk, "/c", Keys()).read(0, len(content))) == content


def test_an_encrypted_chunk_hides_its_content_and_needs_its_key() -> None:
    disk = SimulatedDisk()
    put(disk, "/c", b"secret words " * 10_000, sealing("none", True))
    assert b"secret" not in disk.open("/c").pread(1 << 20, 0)
    with pytest.raises(KeyMissing, match="encrypted"):
        open_chunk(disk, "/c")
    with pytest.raises(NotFound):
        open_chunk(disk, "/c", Keys(versions=(2,)))


def blocks_of(disk: SimulatedDisk, path: str) -> tuple[bytes, list[int]]:
    file = disk.open(path)
    chunk = open_chunk(disk, path, Keys())
    assert isinstance(chunk, FramedChunk)
    return file.pread(file.size(), 0), list(chunk._blocks.starts)


def replaced(disk: SimulatedDisk, path: str, data: bytes) -> None:
    disk.put_atomically(path, data)


@pytest.mark.parametrize("with_checksums", [True, False])
def test_an_encrypted_block_opens_only_at_its_place(with_checksums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker can mend checksums, so the seal must hold without them."""
    disk = SimulatedDisk()
    content = bytes(4 * BLOCK_BYTES)
    for name, seed in (("/a", 1), ("/b", 2)):
        put(disk, name, content, sealing("none", True, seed))
    data, starts = blocks_of(disk, "/a")
    other, _ = blocks_of(disk, "/b")
    one, two = slice(starts[0], starts[1]), slice(starts[1], starts[2])
    swapped = data[: one.start] + data[two] + data[one] + data[two.stop :]
    foreign = data[: one.start] + other[one] + data[one.stop :]
    if not with_checksums:
        monkeypatch.setattr(framed, "crc32c", None)
    for forged in (swapped, foreign):
        replaced(disk, "/a", forged)
        with pytest.raises(CorruptionError):
            open_chunk(disk, "/a", Keys()).read(0, 100)
    # Cut to three blocks, with a header and a table that say so.
    header = bytearray(data[:HEADER_BYTES])
    header[48 - 8 : 48] = (3 * BLOCK_BYTES).to_bytes(8, "little")
    header[48:52] = (3).to_bytes(4, "little")
    replaced(disk, "/a", bytes(header) + data[starts[0] : starts[3]] + data[starts[4] : starts[4] + 24])
    with pytest.raises(CorruptionError):
        open_chunk(disk, "/a", Keys()).read(0, 100)


def test_a_chunk_does_not_open_under_another_id() -> None:
    disk = SimulatedDisk()
    put(disk, "/a", b"x" * 100, sealing("none", True))
    data = bytearray(disk.open("/a").pread(1 << 20, 0))
    data[32] ^= 1  # the chunk id in the header
    head = bytes(data[: HEADER_BYTES - 4])
    assert crc32c is not None
    data[HEADER_BYTES - 4 : HEADER_BYTES] = crc32c(head).to_bytes(4, "little")
    replaced(disk, "/a", bytes(data))
    with pytest.raises(WrongKey):
        open_chunk(disk, "/a", Keys())


def test_a_block_never_becomes_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small frame that declares a huge size must not be believed."""
    disk = SimulatedDisk()
    bomb = framed.arrow_codec(1).compress(bytes(50 << 20))
    real = framed.arrow_codec

    class Bomber:
        def compress(self, data: bytes) -> bytes:
            return bytes(bomb)

    monkeypatch.setattr(framed, "arrow_codec", lambda codec, level=1: Bomber())
    put(disk, "/c", content_of(BLOCK_BYTES), sealing("zstd", False))
    monkeypatch.setattr(framed, "arrow_codec", real)
    with pytest.raises(CorruptionError, match="decompress"):
        open_chunk(disk, "/c").read(0, 10)


@pytest.mark.parametrize(("codec", "encrypted"), ALL[1:])
def test_a_resident_chunk_is_decoded_once_and_read_again_on_demand(codec: Codec, encrypted: bool) -> None:
    disk = SimulatedDisk()
    content = content_of(3 * BLOCK_BYTES + 100)
    put(disk, "/c", content, sealing(codec, encrypted))
    chunk = open_chunk(disk, "/c", Keys(), resident=True)
    assert chunk.lazy
    assert chunk.view is not None
    assert bytes(chunk.view) == bytes(len(content)), "nothing is decoded before it is read"
    assert bytes(chunk.read(BLOCK_BYTES - 5, BLOCK_BYTES + 5)) == content[BLOCK_BYTES - 5 : BLOCK_BYTES + 5]
    assert bytes(chunk.read(0, len(content))) == content == bytes(chunk.view)
    disk.flip("/c", 8 * (HEADER_BYTES + 10))
    assert bytes(chunk.read(0, 10)) == content[:10]
    with pytest.raises(CorruptionError):
        chunk.read_again(0, 10)
    chunk.close()


def test_decoded_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed, "decoded_memory", framed.DecodedMemory(150_000))
    disk = SimulatedDisk()
    for name in ("/a", "/b"):
        put(disk, name, content_of(100_000), sealing("lz4", False))
    first, second = (open_chunk(disk, name, resident=True) for name in ("/a", "/b"))
    assert first.view is not None
    assert second.view is None
    assert bytes(second.read(0, 100_000)) == content_of(100_000)
    first.close()
    assert open_chunk(disk, "/b", resident=True).view is not None


def test_a_scrub_needs_no_key() -> None:
    disk = SimulatedDisk()
    put(disk, "/c", content_of(200_000), sealing("zstd", True))
    assert check_blocks(disk, "/c") == 1
    disk.flip("/c", 8 * (HEADER_BYTES + 70_000))
    with pytest.raises(CorruptionError, match="/c.*block 1 is not what was written"):
        check_blocks(disk, "/c")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_reader_that_knows_the_key_refuses_plain_files_and_those_of_other_keys(codec: Codec) -> None:
    """The manifest's word on a chunk goes with its name: a plain file says nothing of who wrote it."""
    disk = SimulatedDisk()
    put(disk, "/plain", b"abc", sealing(codec, False))
    put(disk, "/sealed", b"abc", sealing(codec, True))
    for path, key in (("/plain", 0), ("/sealed", 1)):
        assert (key_of(disk, path), check_blocks(disk, path, key)) == (key, key)
        assert open_chunk(disk, path, Keys(), key=key).key == open_chunk(disk, path, Keys()).key == key
    for path, key, says in (
        ("/plain", 1, "/plain.*it is not encrypted, and its table is"),
        ("/sealed", 2, "/sealed.*it is encrypted with key 1, and its table has key 2"),
        ("/sealed", 0, "/sealed.*it is encrypted with key 1, and its table is not encrypted"),
    ):
        for read in (lambda path, key: open_chunk(disk, path, Keys(), key=key), partial(check_blocks, disk)):
            with pytest.raises(CorruptionError, match=says):
                read(path, key)


def test_keys_are_lent_to_the_process_by_the_identity_in_the_files() -> None:
    disk = SimulatedDisk()
    source = {5: bytes(32)}.__getitem__
    put(disk, "/c", b"abc", Sealing(keys=TableKeyRing(source, 5)))
    with pytest.raises(KeyMissing, match="encrypted"):
        open_chunk(disk, "/c")
    with lending(STORE, source):
        assert bytes(open_chunk(disk, "/c").read(0, 3)) == b"abc"
    with lending(STORE, lambda table: b"x" * 32), pytest.raises(WrongKey):
        open_chunk(disk, "/c")
    with lending(bytes(16), source), pytest.raises(KeyMissing):
        open_chunk(disk, "/c")


@given(data=st.data(), codec=st.sampled_from(["zstd", "lz4"]))
@settings(max_examples=40, deadline=None)
def test_bytes_that_are_no_container_never_crash_a_reader(data: st.DataObject, codec: Codec) -> None:
    disk = SimulatedDisk()
    put(disk, "/c", content_of(70_000), sealing(codec, False))
    raw = bytearray(disk.open("/c").pread(1 << 20, 0))
    cut = data.draw(st.integers(len(framed.MAGIC), len(raw)))
    replaced(disk, "/c", bytes(raw[:cut]))
    if cut < len(raw):
        with pytest.raises(CorruptionError):
            chunk = open_chunk(disk, "/c")
            chunk.read(0, chunk.size)


def test_a_crash_leaves_the_whole_chunk_or_no_name() -> None:
    content = content_of(150_000)

    def scenario(disk: SimulatedDisk) -> None:
        for name, how in (("/plain", Sealing()), ("/framed", sealing("lz4", True))):
            put(disk, name, content, how)

    def check(disk: SimulatedDisk) -> None:
        for name in ("/plain", "/framed"):
            if disk.exists(name):
                assert bytes(open_chunk(disk, name, Keys()).read(0, len(content))) == content

    for operation in range(1, 60):
        disk = SimulatedDisk()
        disk.on_image = lambda: 0
        scenario(disk)
        if operation > len(disk.images):
            break
        for mode in ("strict", "kept", "torn"):
            check(disk.images[operation - 1].restore(mode, seed=operation))
    check(disk.image().restore("strict"))
    assert all(disk.image().restore("strict").exists(name) for name in ("/plain", "/framed"))


def test_a_write_that_fails_can_be_tried_again() -> None:
    for at in range(1, 8):
        disk = SimulatedDisk(faults=(Fault(at=at, kind="eio"),))
        try:
            put(disk, "/c", content_of(3 << 20), sealing("lz4", False))
        except OSError:
            put(disk, "/c", content_of(3 << 20), sealing("lz4", False))
        assert open_chunk(disk, "/c").size == 3 << 20


def test_without_cryptography_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["cryptography"] = None
sys.modules["cryptography.hazmat.primitives.ciphers.aead"] = None
from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.archive.container import create_chunk
from penstock.errors import Invalid
from penstock.testing.disk import SimulatedDisk
class Keys:
    def current(self): return 1
    def key(self, version): return bytes(32)
try:
    create_chunk(SimulatedDisk(), "/c", ChunkIdentity(store=bytes(16), chunk_id=1), Sealing(keys=Keys()))
except Invalid as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "penstock[crypto]" in done.stdout
    assert done.stdout.count("\n") == 1


def test_arguments_are_checked() -> None:
    with pytest.raises(Invalid):
        ChunkIdentity(store=b"short", chunk_id=1)
    with pytest.raises(Invalid):
        Sealing(codec="brotli")  # type: ignore[arg-type]
