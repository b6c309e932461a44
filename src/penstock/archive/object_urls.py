"""Opens the object store of a URL, and finds out whether it can be trusted with conditional puts.

Thread: any.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.archive.folder_objects import FolderObjects
from penstock.archive.objects import ObjectStore
from penstock.archive.remote_objects import RemoteObjects
from penstock.errors import Invalid
from penstock.host.files import FileSystem
from penstock.host.randomness import Random

URL_BYTES_MAX = 1_000
SCHEMES = ("s3", "gs", "az", "file", "memory")
PROBES = "probes"


def check_url(url: object) -> str:
    """Return the URL of an archive without a slash at its end; `Invalid` says what is wrong with it."""
    if not isinstance(url, str) or not 0 < len(url) <= URL_BYTES_MAX or not url.isascii() or not url.isprintable():
        raise Invalid(f"{url!r} is not the URL of an archive: give one like 's3://bucket/prefix' or 'file:///a/folder'")
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise Invalid(f"{url!r} is not the URL of an archive: it begins with one of {', '.join(SCHEMES)}, then ://")
    if "@" in parts.netloc:
        raise Invalid("the URL of an archive has no credentials: put them into the environment of the process")
    if parts.query or parts.fragment or "%" in url or any(part in (".", "..") for part in parts.path.split("/")):
        raise Invalid(f"{url!r} is not the URL of an archive: omit '?', '#', '%' and '..'")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise Invalid(f"{url!r} names no folder: give an absolute one, like 'file:///var/archive'")
    elif parts.scheme != "memory" and not parts.netloc:
        raise Invalid(f"{url!r} names no bucket: give one, like '{parts.scheme}://bucket/prefix'")
    return url.rstrip("/") if parts.path.strip("/") or parts.netloc else url


def open_objects(url: str, fs: FileSystem, *, request_timeout_s: float = 120.0) -> ObjectStore:
    """Return the object store of a URL. Nothing is sent yet."""
    url = check_url(url)
    if url.startswith("file://"):
        return FolderObjects(fs, url.removeprefix("file://"))
    return RemoteObjects(url, request_timeout_s=request_timeout_s)


def probe(objects: ObjectStore, store: str, random: Random) -> None:
    """Check that a put of an existing key is refused; `Invalid` if the object store ignores the condition.

    Requires: no other probe for this store runs. One that ended early left an object, which is deleted.
    """
    for leftover in list(objects.listed(f"{store}/{PROBES}")):
        objects.delete(leftover.key)
    key = f"{store}/{PROBES}/{random.randbytes(8).hex()}"
    created = objects.put_new(key, b"1")
    try:
        if objects.put_new(key, b"2") or (created and objects.read(key, 0, 2) != b"1"):
            raise Invalid(
                f"{objects.url} overwrites objects although it is told not to (If-None-Match): two stores could "
                "damage each other's archive; use another object store"
            )
    finally:
        objects.delete(key)
