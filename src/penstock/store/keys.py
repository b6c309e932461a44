"""The keys of a store's encrypted tables, in its owner: unwraps them with the master keys, and seals sections.

Thread: any; what is unwrapped is remembered, so that the master keys are needed once for a table.
Invariants: (1) the master keys never leave this module. (2) whether a table is encrypted never changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from penstock.archive.master_keys import KEY_BYTES, MasterKeys, unwrap, wrap
from penstock.archive.sealer import ByteSealer
from penstock.archive.storage import PLAIN_FILES, CodecOfLevel, FileStorage, WrappedKey
from penstock.archive.table_keys import GENERATION, TableKeyRing
from penstock.errors import CorruptionError, KeyMissing, WrongKey
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId, table_of
from penstock.journal.record import CODEC_SEALED, INLINE, Section, SegmentedRecordHeader
from penstock.manifest.records import EncryptionConfig
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import Entry
from penstock.partition.storage_options import codecs_of, decode_storage, encode_storage

_SECTION = struct.Struct("<7sxQ")  # a label, the partition
_LABEL = b"section"
KEY_ID = "master"  # in the options of encrypted tables: a store has one series of master keys


class StoreKeys:
    """The keys of a store's tables. `find` returns a table by its id."""

    def __init__(
        self,
        identity: bytes,
        masters: MasterKeys | None,
        random: Random,
        find: Callable[[int], TableInfo | None],
        encrypt: bool,
    ) -> None:
        self._identity = identity
        self._masters = masters
        self._random = random
        self._find = find
        self._encrypt = encrypt  # new tables, by default
        self._keys: dict[int, bytes] = {}  # by table; a key never changes
        self._files: dict[int, FileStorage] = {}  # by table, if it is encrypted

    # -- tables

    def new_table(self, storage: bytes, encrypted: bool | None) -> tuple[bytes, WrappedKey | None]:
        """Return the storage options of a new table, with its encryption, and a key for it if it is encrypted.

        `encrypted`: None means as its options say, or else as the store does by default.
        """
        options = decode_storage(storage)
        if encrypted is None:
            encrypted = options.encryption is not None or self._encrypt
        if not encrypted:
            return encode_storage(msgspec.structs.replace(options, encryption=None)), None
        if self._masters is None:
            raise KeyMissing(
                "an encrypted table needs a master key: open the store with keys=, or set PENSTOCK_KEYS before its "
                "owner starts"
            )
        key = wrap(self._random.randbytes(KEY_BYTES), self._masters, self.newest(), self._identity, self._random)
        return encode_storage(msgspec.structs.replace(options, encryption=EncryptionConfig(KEY_ID, key.version))), key

    def check(self, tables: Iterable[TableInfo]) -> None:
        """Unwrap the keys of tables; `KeyMissing` or `WrongKey` if the right master keys were not given."""
        for info in tables:
            if info.key is not None:
                self._unwrapped(info)

    def learn(self, table_id: int, wrapped: WrappedKey) -> None:
        """Unwrap the key of a table from a form that the ledger does not have yet, if the right master key is here."""
        with suppress(KeyMissing, WrongKey):
            self._keys[table_id] = unwrap(wrapped, self._masters, self._identity, str(table_id))

    def check_stored(self, tables: Iterable[TableInfo]) -> None:
        """Raise `KeyMissing` or `WrongKey` if the master keys, as they are now, do not unwrap what is stored."""
        for info in tables:
            if info.key is not None:
                unwrap(info.key, self._masters, self._identity, info.name)

    def rewrapped(self, tables: Iterable[TableInfo], version: int) -> list[tuple[TableInfo, WrappedKey]]:
        """Return the keys of encrypted tables wrapped by a master key of this version, where another one does."""
        if self._masters is None:
            return []
        return [
            (info, wrap(self._unwrapped(info), self._masters, version, self._identity, self._random))
            for info in tables
            if info.key is not None and info.key.version != version
        ]

    def newest(self) -> int:
        """Return the version of the newest master key; `KeyMissing` if none were given."""
        if self._masters is None:
            raise KeyMissing(
                "there is no master key to rotate to: open the store with keys=, or `penstock serve --keys`"
            )
        return self._masters.current()

    def table_key(self, table_id: int) -> bytes:
        """Return the key of an encrypted table; `KeyMissing` if there is no such table."""
        key = self._keys.get(table_id)
        if key is None:
            info = self._find(table_id)
            if info is None or info.key is None:
                raise KeyMissing(f"there is no encrypted table {table_id} here")
            key = self._unwrapped(info)
        return key

    def _unwrapped(self, info: TableInfo) -> bytes:
        key = self._keys.get(info.table_id)
        if key is None:
            assert info.key is not None
            key = unwrap(info.key, self._masters, self._identity, info.name)
            self._keys[info.table_id] = key
        return key

    def files_of(self, table_id: int) -> FileStorage:
        """Return how the files of a table are written."""
        files = self._files.get(table_id)
        if files is not None:
            return files
        info = self._find(table_id)
        if info is None:
            return PLAIN_FILES  # the ledger
        if info.key is None:
            return FileStorage(partial(self._codecs, table_id))
        key = self._unwrapped(info)
        storage = FileStorage(
            partial(self._codecs, table_id),
            TableKeyRing(self.table_key, table_id),
            ByteSealer(key, self._random),
            self._random,
        )
        return self._files.setdefault(table_id, storage)  # one sealer for a table

    def _codecs(self, table_id: int) -> Sequence[CodecOfLevel]:
        info = self._find(table_id)
        return codecs_of(info.storage_options) if info is not None and info.storage else ()

    # -- sections

    def seal_section(self, partition: PartitionId, payload: bytes) -> Section:
        """Return an inline section of an encrypted table, as the journal and everyone after it carry it."""
        sealer = self.files_of(table_of(partition)).sealer
        assert sealer is not None
        sealed = sealer.seal(payload, _SECTION.pack(_LABEL, partition))
        return Section(SegmentedRecordHeader(partition, INLINE, CODEC_SEALED, GENERATION), sealed)

    def opener(self, table_id: int) -> Callable[[Entry], Entry] | None:
        """Return what opens the sealed sections of a table's entries; None if the table is not encrypted."""
        sealer = self.files_of(table_id).sealer
        return None if sealer is None else partial(_opened, sealer)


def _opened(sealer: ByteSealer, entry: Entry) -> Entry:
    return msgspec.structs.replace(
        entry, sections=tuple(_open_section(sealer, section, entry.lsn) for section in entry.sections)
    )


def _open_section(sealer: ByteSealer, section: Section, lsn: int) -> Section:
    header = section.header
    if header.codec != CODEC_SEALED:
        if header.form == INLINE and section.payload:  # an empty one keeps the place of what was dropped
            raise CorruptionError("journal", 0, f"a section of record {lsn} is not encrypted, and its table is")
        return section
    payload = sealer.open(section.payload, _SECTION.pack(_LABEL, header.partition))
    if payload is None:
        raise CorruptionError("journal", 0, f"a section of record {lsn} was not sealed with its table's key")
    return Section(SegmentedRecordHeader(header.partition, header.form), payload)
