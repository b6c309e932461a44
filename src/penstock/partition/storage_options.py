"""Options that tables of every kind have: where and how their files are stored, archived and kept.

`StorageOptions` is what a user passes and what the ledger stores with a table: a version and a MessagePack map with a
key for each field that is not the default. The ledger's record of a change is journalled, so all replicas have the same
options; the manifest's row of the table follows it (`ManifestDbOptions`). To add an option, add a field whose default
describes tables of earlier versions, a check of its value in its own type, and, if it cannot change, a rule in
`check_change`. The parts of a store read `TableInfo.storage_options`, or `MachineContext.storage_of(table_id)`: both
are the options as they are now.

Thread: immutable values and pure functions.
Invariant: options that `encode_storage` returned can be decoded, and pass every check, at each replay.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import Any

import msgspec

from penstock.archive.storage import LEVELS_MAX, CodecOfLevel
from penstock.arguments import in_short, whole
from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.manifest.records import (
    LIMIT_MAX,
    ArchivePolicy,
    Codec,
    CompressionConfig,
    EncryptionConfig,
    ManifestDbOptions,
    RetentionPolicy,
)

VERSION = 1
STORAGE_BYTES_MAX = 64 << 10  # of encoded options, as a client sends them
FOLDER = "tables"  # of all files of tables, unless a table has another one
VOLUMES = "volumes"  # other folders are below this one: the operator mounts disks there
_VERSION = struct.Struct(">H")
_FOLDER = re.compile(rf"{VOLUMES}/[a-z0-9][a-z0-9_-]{{0,30}}")


class StorageOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How and where a table stores its files, whatever its kind. `store.alter` changes them, except the folders.

    `wal_dir` and `chunk_dir` are "tables", or "volumes/<name>": a folder of the store on which another disk may be
    mounted. The first holds the table's own log, the second its files.

    >>> options = penstock.StorageOptions(chunk_dir="volumes/large")
    >>> store.kv("archive_of_users", storage=options)
    <KvTable 'archive_of_users' of bytes>
    """

    wal_dir: str = FOLDER
    chunk_dir: str = FOLDER
    compression: CompressionConfig = CompressionConfig()
    encryption: EncryptionConfig | None = None
    retention: RetentionPolicy = RetentionPolicy()
    archive: ArchivePolicy | None = None
    level_compression: tuple[CompressionConfig, ...] = ()  # by level of the tree, the last one for all deeper
    lag_max: int | None = None  # records that a shard may be behind; None: `DispatcherSettings.partition_lag_max`

    def __post_init__(self) -> None:
        for name in ("wal_dir", "chunk_dir"):
            folder = getattr(self, name)
            if not isinstance(folder, str) or (folder != FOLDER and not _FOLDER.fullmatch(folder)):
                raise Invalid(
                    f"{name} is {FOLDER!r} or '{VOLUMES}/' and a name of a-z, 0-9, _ and -, not {in_short(folder)}"
                )

        levels: Any = self.level_compression
        if not isinstance(levels, tuple) or len(levels) > LEVELS_MAX:
            raise Invalid(
                f"level_compression is a tuple of up to {LEVELS_MAX} CompressionConfig, not {in_short(levels)}"
            )
        if self.lag_max is not None:
            whole(self.lag_max, "lag_max", 1, LIMIT_MAX)


DEFAULT = StorageOptions()
_TYPES: dict[str, type[Any]] = {
    "compression": CompressionConfig,
    "encryption": EncryptionConfig,
    "retention": RetentionPolicy,
    "archive": ArchivePolicy,
}
_HINTS = {"retention": ": a queue's own alter takes a Retention, a series table's retention_s"}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StorageOptions).decode


def codecs_of(options: StorageOptions) -> list[CodecOfLevel]:
    """Return the codec of each level of a table's tree, and how hard it tries; the last one is for all deeper."""
    configs = options.level_compression or (options.compression,)
    return [(Codec(config.codec).name.lower(), config.level) for config in configs]


def encode_storage(options: Any) -> bytes:
    """Check options and encode them; the default is no bytes. `Invalid` if a value is of the wrong type."""
    if not isinstance(options, StorageOptions):
        raise Invalid(f"storage is a StorageOptions, not {in_short(options)}")
    for name, type_ in _TYPES.items():
        value: Any = getattr(options, name)
        if not isinstance(value, type_) and (value is not None or getattr(DEFAULT, name) is not None):
            raise Invalid(f"{name} is a penstock.{type_.__name__}, not {in_short(value)}{_HINTS.get(name, '')}")
    try:  # decoded again, because a struct is not checked when it is made
        data = _encode(options)
        if _decode(data) != options:
            raise Invalid("a value of the storage options is not a plain value")
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise Invalid(f"the storage options are not valid ({error})") from None
    return b"" if options == DEFAULT else _VERSION.pack(VERSION) + data


@lru_cache(maxsize=1_024)
def decode_storage(data: bytes) -> StorageOptions:
    """Decode options; `UnsupportedVersion` if a newer Penstock wrote them."""
    if not data:
        return DEFAULT
    if len(data) < _VERSION.size:
        raise CorruptionError("storage options", 0, "they have no version")
    (version,) = _VERSION.unpack_from(data)
    if version != VERSION:
        raise UnsupportedVersion(f"storage options have version {version}, this Penstock reads {VERSION}: upgrade it")
    try:
        return _decode(data[_VERSION.size :])
    except (msgspec.MsgspecError, Invalid, UnicodeDecodeError) as error:
        raise CorruptionError("storage options", 0, f"they do not decode ({error})") from None


def for_manifest(options: StorageOptions, detail: bytes) -> ManifestDbOptions:
    """Return options as the manifest's row of a table holds them, with the options of its kind."""
    return ManifestDbOptions(
        options.wal_dir,
        options.chunk_dir,
        options.compression,
        options.encryption,
        options.retention,
        detail,
        options.archive,
    )


def check_storage(data: Any) -> StorageOptions:
    """Return the options that a client sent; `Invalid` if they are not in canonical form."""
    if type(data) is not bytes or len(data) > STORAGE_BYTES_MAX:
        raise Invalid("storage options are bytes, as encode_storage returns them")
    try:
        options = decode_storage(data)
    except (CorruptionError, UnsupportedVersion) as error:
        raise Invalid(f"storage options do not decode ({error})") from None
    if encode_storage(options) != data:
        raise Invalid("storage options are not encoded as they are by encode_storage")
    return options


def check_change(table: str, before: StorageOptions, after: StorageOptions) -> None:
    """Raise `Invalid` if the options of a table cannot change like this."""
    for name in ("wal_dir", "chunk_dir"):
        if getattr(before, name) != getattr(after, name):
            raise Invalid(
                f"{name} of table {table} is fixed ({getattr(before, name)!r}), its files are there: create another "
                "table and copy the rows"
            )
    if (before.encryption is None) != (after.encryption is None):
        raise Invalid(
            f"table {table} is {'not ' if before.encryption is None else ''}encrypted, and stays so, because its "
            "files are: create another table and copy the rows"
        )


def changed(table: str, before: StorageOptions, changes: dict[str, Any]) -> StorageOptions:
    """Return options with some of them replaced; `Invalid` if one is unknown, or cannot change."""
    unknown = sorted(set(changes) - set(StorageOptions.__struct_fields__))
    if unknown:
        raise Invalid(f"{unknown[0]!r} is not a storage option: use {', '.join(StorageOptions.__struct_fields__)}")
    after = msgspec.structs.replace(before, **changes)
    encode_storage(after)
    check_change(table, before, after)
    return after
