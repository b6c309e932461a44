"""Storage options: one encoding, refused values, what may change; and how a store, a client and a replay see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.errors import CorruptionError, Invalid, KindMismatch, NotFound, UnsupportedVersion
from penstock.manifest.records import ArchivePolicy, Codec, CompressionConfig, EncryptionConfig, RetentionPolicy
from penstock.partition.storage_options import (
    DEFAULT,
    StorageOptions,
    changed,
    check_storage,
    decode_storage,
    encode_storage,
)

ANY: Any = 7
ONE: Any = 1.0
YES: Any = True
NOTHING: Any = None
UNHASHABLE: Any = []
NAN: Any = float("nan")
FULL = StorageOptions(
    wal_dir="volumes/fast",
    chunk_dir="volumes/large",
    compression=CompressionConfig(Codec.ZSTD, 9),
    encryption=EncryptionConfig("main", 3),
    retention=RetentionPolicy(age_ms_max=1_000, bytes_max=1 << 40),
    archive=ArchivePolicy(archive_after_ms=5, evict_after_ms=6, local_bytes_max=7),
)


def test_options_have_one_encoding_that_names_what_is_not_the_default() -> None:
    assert encode_storage(DEFAULT) == b""
    assert decode_storage(b"") == DEFAULT
    assert decode_storage(encode_storage(FULL)) == FULL
    one = StorageOptions(chunk_dir="volumes/x")
    assert encode_storage(one) == b"\x00\x01" + msgspec.msgpack.encode({"chunk_dir": "volumes/x"})
    padded = b"\x00\x01" + msgspec.msgpack.encode({"chunk_dir": "volumes/x", "wal_dir": "tables"})
    assert decode_storage(padded) == one
    with pytest.raises(Invalid):
        check_storage(padded)  # a client must not write a second form of the same options


@pytest.mark.parametrize("data", [b"\x00", b"\x00\x01", b"\x00\x01\xc0", b"\x00\x01\x81\xa1x\x01"])
def test_bytes_that_are_not_options_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_storage(data)
    with pytest.raises(Invalid):
        check_storage(data)


def test_options_of_a_later_version_are_not_guessed() -> None:
    with pytest.raises(UnsupportedVersion):
        decode_storage(b"\x00\x02\x80")


@pytest.mark.parametrize(
    "make",
    [
        lambda: StorageOptions(chunk_dir="../x"),
        lambda: StorageOptions(chunk_dir="/abs"),
        lambda: StorageOptions(chunk_dir="volumes/../journal"),
        lambda: StorageOptions(wal_dir="journal"),
        lambda: StorageOptions(wal_dir=ANY),
        lambda: CompressionConfig(Codec.ZSTD, 23),
        lambda: CompressionConfig(Codec.ZSTD, True),
        lambda: CompressionConfig(Codec.LZ4, 1),
        lambda: CompressionConfig(ANY),
        lambda: CompressionConfig(ONE),
        lambda: CompressionConfig(YES),
        lambda: CompressionConfig(UNHASHABLE),
        lambda: RetentionPolicy(age_ms_max=0),
        lambda: RetentionPolicy(age_ms_max=NAN),
        lambda: ArchivePolicy(archive_after_ms=-1),
        lambda: ArchivePolicy(archive_after_ms=NOTHING),
        lambda: ArchivePolicy(evict_after_ms=False),
        lambda: encode_storage({"chunk_dir": "tables"}),
        lambda: encode_storage(StorageOptions(compression=ANY)),
        lambda: encode_storage(StorageOptions(encryption=EncryptionConfig(ANY))),
    ],
)
def test_values_of_the_wrong_type_or_range_are_refused(make: Any) -> None:
    with pytest.raises(Invalid):
        make()


def test_an_option_of_another_class_is_named() -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("retention", penstock.Retention(age_s=60), "retention is a penstock.RetentionPolicy, not .*own alter takes"),
        ("compression", "zstd", "compression is a penstock.CompressionConfig, not 'zstd'"),
        ("archive", 5, "archive is a penstock.ArchivePolicy, not 5"),
        ("compression", None, "compression is a penstock.CompressionConfig, not None"),
    ]
    for option, value, message in wrong:
        with pytest.raises(Invalid, match=message):
            changed("t", StorageOptions(), {option: value})
    assert changed("t", StorageOptions(), {"archive": None}).archive is None


def test_folders_and_encryption_do_not_change() -> None:
    plain = StorageOptions()
    assert changed("t", plain, {"compression": CompressionConfig(Codec.LZ4)}).compression.codec is Codec.LZ4
    for change in ({"chunk_dir": "volumes/x"}, {"wal_dir": "volumes/x"}, {"encryption": EncryptionConfig("k")}):
        with pytest.raises(Invalid):
            changed("t", plain, change)
    with pytest.raises(Invalid):
        changed("t", FULL, {"encryption": None})
    assert changed("t", FULL, {"encryption": EncryptionConfig("main", 4)}).encryption == EncryptionConfig("main", 4)
    with pytest.raises(Invalid, match="not a storage option"):
        changed("t", plain, {"colour": 1})


def test_a_store_keeps_options_and_changes_them_also_for_clients(tmp_path: Path) -> None:
    zstd, lz4 = CompressionConfig(Codec.ZSTD, 3), CompressionConfig(Codec.LZ4)
    with penstock.open(tmp_path / "s") as store:
        store.kv("users", storage=StorageOptions(compression=zstd))
        store.kv("users", storage=StorageOptions(compression=zstd))  # the same ones again
        with pytest.raises(KindMismatch):
            store.kv("users", storage=StorageOptions(compression=lz4))
        with pytest.raises(Invalid):
            store.kv("other", storage="zstd")  # type: ignore[call-overload]
        assert store.tables() == ["users"]
        with penstock.connect(tmp_path / "s") as client:
            assert client.alter("users", compression=lz4).compression == lz4
            client.kv("users", storage=StorageOptions(compression=lz4))
            with pytest.raises(Invalid):
                client.alter("users", chunk_dir="volumes/x")
            with pytest.raises(NotFound):
                client.alter("absent", compression=lz4)
            client.queue("events", storage=StorageOptions(retention=RetentionPolicy(bytes_max=5)))
        with pytest.raises(Invalid):
            store.alter("users", compression=True)  # type: ignore[arg-type]
    with penstock.open(tmp_path / "s") as store:
        tables = {info.name: info for info in store.port.tables()}
        assert tables["users"].storage_options == StorageOptions(compression=lz4)
        assert tables["events"].storage_options.retention.bytes_max == 5
        assert tables["users"].created_us > 0


def test_compression_by_level_is_described_and_changed_while_in_use(tmp_path: Path) -> None:
    zstd, lz4 = CompressionConfig(Codec.ZSTD, 3), CompressionConfig(Codec.LZ4)
    levels = StorageOptions(level_compression=(CompressionConfig(), zstd))
    with penstock.open(tmp_path / "s") as store:
        store.kv("users", storage=levels)
        before = store.describe("users")
        assert before.storage == levels
        with penstock.connect(tmp_path / "s") as client:
            assert client.describe("users").storage == levels
            assert client.alter("users", level_compression=(lz4,)).level_compression == (lz4,)
            changed = client.wait_for_change("users", before.generation, timeout_s=30.0)
            assert changed.storage == StorageOptions(level_compression=(lz4,))
        assert store.alter("users", level_compression=(), compression=zstd) == StorageOptions(compression=zstd)
        with pytest.raises(Invalid):
            store.alter("users", level_compression=zstd)  # type: ignore[arg-type]
    with penstock.open(tmp_path / "s") as store:
        assert store.describe("users").storage == StorageOptions(compression=zstd)
