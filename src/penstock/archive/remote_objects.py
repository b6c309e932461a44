"""Object stores on the network, and in memory, through the package obstore.

Credentials, regions and endpoints come from the environment, as the tools of each provider read them (AWS_*, GOOGLE_*,
AZURE_*). The library's own retries are off: `retrying` does them, with one deadline.

Thread: any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from penstock.archive.objects import NetworkFailure, StoredObject, check_key
from penstock.errors import ArchiveUnavailable, Invalid
from penstock.host.files import Buffer

CONNECT_S = 10.0
_STATUS = re.compile(r"status(?: code)?:? (4[0-9][0-9])")
_WORTH_A_RETRY = frozenset({"408", "409", "425", "429"})
T = TypeVar("T")
_MEMORY: dict[str, Any] = {}  # the stores of this process by URL: reopening one finds its objects


class RemoteObjects:
    """The objects below a URL."""

    def __init__(self, url: str, *, request_timeout_s: float) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import MemoryStore, from_url
        except ImportError:
            raise Invalid(
                f"{url} needs the package obstore: install it with pip install 'penstock[s3]', or use file:///a/folder"
            ) from None
        self.url = url
        self._obstore, self._errors = obstore, exceptions
        if url.startswith("memory://"):
            self._store: Any = _MEMORY.setdefault(url, MemoryStore())
            return
        try:
            self._store = from_url(
                url,
                client_options={
                    "allow_http": True,  # providers use HTTPS; an endpoint that says http:// means it
                    "timeout": timedelta(seconds=request_timeout_s),
                    "connect_timeout": timedelta(seconds=min(CONNECT_S, request_timeout_s)),
                },
                retry_config={"max_retries": 0},
            )
        except Exception as error:  # of a class for each provider
            raise Invalid(f"{url} is not an object store that can be used: {_first_line(error)}") from None

    def put_new(self, key: str, data: Buffer) -> bool:
        def put() -> bool:
            try:
                self._obstore.put(self._store, check_key(key), data, mode="create", use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            return True

        return self._call(key, put)

    def read(self, key: str, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        return self._call(
            key, lambda: bytes(self._obstore.get_range(self._store, check_key(key), start=start, end=end))
        )

    def size(self, key: str) -> int | None:
        try:
            return self._call(key, lambda: int(self._obstore.head(self._store, check_key(key))["size"]))
        except FileNotFoundError:
            return None

    def listed(self, prefix: str) -> Iterator[StoredObject]:
        pages = iter(self._call(prefix, lambda: self._obstore.list(self._store, prefix=check_key(prefix))))
        while page := self._call(prefix, lambda: next(pages, None)):
            for entry in page:
                yield StoredObject(entry["path"], entry["size"])

    def folders(self) -> list[str]:
        listing = self._call("", lambda: self._obstore.list_with_delimiter(self._store))
        return [name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"]]

    def delete(self, key: str) -> None:
        try:
            self._call(key, lambda: self._obstore.delete(self._store, check_key(key)))
        except FileNotFoundError:
            return

    def _call(self, key: str, act: Callable[[], T]) -> T:
        where = f"{self.url.rstrip('/')}/{key}"
        try:
            return act()
        except FileNotFoundError:
            raise FileNotFoundError(2, "there is no such object", where) from None
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            raise ArchiveUnavailable(
                f"{where} was refused ({_first_line(error)}): check the credentials in the environment of this process"
            ) from None
        except (Invalid, ArchiveUnavailable):
            raise
        except Exception as error:  # the library has one class for all that the network does
            status = _STATUS.search(str(error))
            kind = NetworkFailure
            if status is not None and status[1] not in _WORTH_A_RETRY:
                kind = ArchiveUnavailable  # type: ignore[assignment]
            raise kind(f"{where} cannot be used now ({_first_line(error)}): try again later") from None


def _first_line(error: BaseException) -> str:
    """Return what an error of the library says, without the dump of its fields that follows."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
