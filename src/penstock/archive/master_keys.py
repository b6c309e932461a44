"""Master keys: where they come from, and how they wrap the key of a table.

A user gives `keys=` as

    "file:PATH"          a file with one key a line: its version, a space, 64 hexadecimal digits; # begins a comment
    "env:NAME"           an environment variable of the same form, lines separated by commas or newlines
    {1: key, 2: key}     the keys themselves, 32 bytes each
    a function           called with a version, or None for the newest; returns (version, key)

The key with the highest version wraps new keys (of a function: the one that it returns for None). Keys are read when
they are needed, so that a key file may be changed while the store is open.

Thread: any.
Invariant: no message, representation or log line contains a key.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from penstock.archive.framed import aes_gcm
from penstock.archive.storage import WrappedKey
from penstock.arguments import in_short
from penstock.errors import Invalid, KeyMissing, WrongKey
from penstock.host.environment import environment_variable
from penstock.host.file_errors import translate_os_errors
from penstock.host.files import FileSystem
from penstock.host.private_files import others_can_read
from penstock.host.randomness import Random

logger = logging.getLogger(__name__)

KEY_BYTES = 32
VERSION_MAX = (1 << 31) - 1
FILE_BYTES_MAX = 1 << 20
_CONTEXT = struct.Struct("<16s16sQ")  # a label, the store's identity, the version
_LABEL = b"penstock tablekey"[:16]


Keys: TypeAlias = str | Mapping[int, bytes] | Callable[[int | None], tuple[int, bytes]]  # what a user may give


class MasterKeys(Protocol):
    """The master keys of a store, by version."""

    def current(self) -> int:
        """Return the version that wraps new keys; `KeyMissing` if there is none."""

    def key(self, version: int) -> bytes:
        """Return a key; `KeyMissing` if there is none of this version."""


class _ListedKeys:
    """Keys that are listed somewhere, each time they are needed."""

    def __init__(self, read: Callable[[], Mapping[int, bytes]], where: str) -> None:
        self._read = read
        self._where = where

    def __repr__(self) -> str:
        return f"<master keys from {self._where}>"

    def current(self) -> int:
        versions = self._read()
        if not versions:
            raise KeyMissing(f"{self._where} holds no key: add one with `penstock keys new`")
        return max(versions)

    def key(self, version: int) -> bytes:
        key = self._read().get(version)
        if key is None:
            raise KeyMissing(f"{self._where} does not hold master key {version}, which the store needs: add it")
        return key


class _CalledKeys:
    """Keys that a function of the user returns, such as a client of a key service."""

    def __init__(self, fetch: Callable[[int | None], Any]) -> None:
        self._fetch = fetch

    def current(self) -> int:
        return self._call(None)[0]

    def key(self, version: int) -> bytes:
        key_version, key = self._call(version)
        if key_version != version:
            raise KeyMissing(f"the function given as keys= returned master key {key_version}, not {version}")
        return key

    def _call(self, version: int | None) -> tuple[int, bytes]:
        try:
            result = self._fetch(version)
        except KeyMissing:
            raise
        except Exception as error:
            requested = "the newest master key" if version is None else f"master key {version}"
            raise KeyMissing(
                f"the function given as keys= did not return {requested} ({type(error).__name__})"
            ) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise Invalid("the function given as keys= must return (version, key): a number and 32 bytes")
        return _checked_version(result[0]), _checked_key(result[1], result[0])


def master_keys(keys: Any, fs: FileSystem) -> MasterKeys | None:
    """Return what a user gave as `keys=` as master keys; `Invalid` if it is none of the forms."""
    if keys is None:
        return None
    if isinstance(keys, str):
        form, _, where = keys.partition(":")
        if form == "file" and where:
            if others_can_read(where):
                logger.warning("the key file %s can be read by other users of this machine: chmod 600 it", where)
            return _ListedKeys(lambda: _parse(_file_text(fs, where), where), where)
        if form == "env" and where:
            return _ListedKeys(lambda: _parse(environment_variable(where), f"${where}"), f"${where}")
        raise Invalid("keys= is file:PATH or env:NAME, never a key itself as text")
    if isinstance(keys, Mapping):
        listed = {_checked_version(version): _checked_key(key, version) for version, key in keys.items()}
        return _ListedKeys(lambda: listed, "keys=")
    if callable(getattr(keys, "current", None)) and callable(getattr(keys, "key", None)):
        provider: MasterKeys = keys
        return provider
    if callable(keys):
        return _CalledKeys(keys)
    raise Invalid(f"keys= is file:PATH, env:NAME, a dict of keys or a function, not {type(keys).__name__}")


def format_key(version: int, key: bytes) -> str:
    """Return the line of a key file for a key."""
    return f"{version} {key.hex()}\n"


def key_versions(fs: FileSystem, path: str) -> list[int]:
    """Return the versions in a key file, in order; none if the file does not exist."""
    return sorted(_parse(_file_text(fs, path), path)) if fs.exists(path) else []


def _file_text(fs: FileSystem, path: str) -> str:
    with translate_os_errors():
        try:
            file = fs.open(path)
        except FileNotFoundError:
            raise KeyMissing(f"there is no key file {path}: create it with `penstock keys new {path}`") from None
        except (IsADirectoryError, NotADirectoryError, PermissionError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Invalid(
                f"{path!r} is not a key file that this user can read ({reason}): give keys= another one"
            ) from None
        try:
            if file.size() > FILE_BYTES_MAX:
                raise Invalid(f"{path} is too large for a key file")
            return file.pread(file.size(), 0).decode("ascii", "replace")
        finally:
            file.close()


def _parse(text: str | None, where: str) -> dict[int, bytes]:
    if text is None:
        raise KeyMissing(f"{where} is not set: set it to the store's master keys")
    keys: dict[int, bytes] = {}
    for number, line in enumerate(text.replace(",", "\n").splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        try:
            version, key = int(parts[0]), bytes.fromhex(parts[1])
            good = (
                len(parts) == 2
                and parts[0].isdecimal()
                and len(key) == KEY_BYTES
                and 0 < version <= VERSION_MAX
                and version not in keys
            )
        except (ValueError, IndexError):
            good = False
        if not good:  # without the line: it may be most of a key
            raise Invalid(f"line {number} of {where} is not a new version from 1, a space, and 64 hexadecimal digits")
        keys[version] = key
    return keys


def _checked_version(version: Any) -> int:
    if type(version) is not int or not 0 < version <= VERSION_MAX:
        raise Invalid(f"the version of a master key is a number from 1, not {in_short(version)}")
    return version


def _checked_key(key: Any, version: Any) -> bytes:
    if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_BYTES:
        raise Invalid(f"master key {version} is not {KEY_BYTES} bytes")
    return bytes(key)


def wrap(key: bytes, masters: MasterKeys, version: int, identity: bytes, random: Random) -> WrappedKey:
    """Wrap a table's key with the master key of a version, for the store with this identity."""
    nonce, master = random.randbytes(12), _checked_key(masters.key(version), version)
    return WrappedKey(version, nonce, aes_gcm(master).encrypt(nonce, key, _CONTEXT.pack(_LABEL, identity, version)))


def unwrap(wrapped: WrappedKey, masters: MasterKeys | None, identity: bytes, name: str) -> bytes:
    """Return a table's key; `KeyMissing` or `WrongKey`, with the table's name, if it cannot be unwrapped."""
    if masters is None:
        raise KeyMissing(
            f"table {name} is encrypted with master key {wrapped.version}: open the store with keys=, "
            "or set PENSTOCK_KEYS to file:PATH or env:NAME"
        )
    master = _checked_key(masters.key(wrapped.version), wrapped.version)
    aead = aes_gcm(master)
    from cryptography.exceptions import InvalidTag

    try:
        key: bytes = aead.decrypt(wrapped.nonce, wrapped.wrapped, _CONTEXT.pack(_LABEL, identity, wrapped.version))
    except (InvalidTag, ValueError):
        raise WrongKey(
            f"master key {wrapped.version} is not the one that table {name} was encrypted with: give the right keys="
        ) from None
    return key
