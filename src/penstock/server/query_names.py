"""Names of queries that took a snapshot: a query gets only one, from this owner or an earlier one.

The tasks of a query take its snapshot by its name; the first task creates it. After that snapshot was closed, or its
owner ended, a late task must not get another one: the query would silently mix two LSNs.

    <store>/run/queries     a line for each name of the last day: the time in microseconds, then client/name; then zeros

The zeros are space for further names: reads continue on a full disk. When it is used up, queries are refused.

Thread: any; `_lock` guards everything.
Invariant: when a client has too many names, only its own oldest ones are forgotten.
"""

from __future__ import annotations

import logging

from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import is_disk_full, translate_os_errors
from penstock.host.file_operations import make_dirs, zero_fill
from penstock.host.files import FileSystem
from penstock.host.paths import parent

logger = logging.getLogger(__name__)

KEPT_US = 24 * 3600 * 1_000_000
NAMES_MAX = 100_000  # of one client
NAME_LENGTH_MAX = 200
FILE_BYTES_MAX = 64 << 20  # then it is rewritten
AHEAD_BYTES = 64 << 10  # some 600 names of Spark's queries


class QueryNames:
    """The query names that were used."""

    def __init__(self, fs: FileSystem, path: str, clock: Clock) -> None:
        self._clock = clock
        self._lock = threads.lock("server.query_names")
        self._names: dict[str, dict[str, int]] = {}  # guarded by _lock; by client and name, when it was used
        make_dirs(fs, parent(path))
        self._file = fs.open(path, write=True) if fs.exists(path) else fs.create(path)
        self._reserved = self._file.size()
        data = self._file.pread(self._reserved, 0)
        self._at = data.rfind(b"\n") + 1  # after the last whole line
        old, oldest_us = False, clock.time_us() - KEPT_US
        for line in data[: self._at].decode(errors="replace").splitlines():
            time_us, _, full_name = line.partition(" ")
            client, slash, name = full_name.partition("/")
            if not slash:  # the older format, without a client
                client, name = "", client
            if time_us.isdigit() and int(time_us) > oldest_us:
                self._keep(client, name, int(time_us))
            else:
                old = True
        if old:
            self._rewrite()
        self._reserve()

    def use(self, name: str, client: str = "") -> bool:
        """Record a name of a client; False if it was used before."""
        if not 0 < len(name) <= NAME_LENGTH_MAX or not name.isascii() or not name.isprintable():
            raise Invalid(f"a query's name has 1 to {NAME_LENGTH_MAX} printable characters")
        with self._lock:
            if name in self._names.get(client, {}):
                return False
            now_us = self._clock.time_us()
            data = f"{now_us} {client}/{name}\n".encode()
            with translate_os_errors():
                self._reserve()
                self._file.pwrite(data, self._at)  # not synced: a machine crash ends the query's tasks, too
            self._at += len(data)
            self._keep(client, name, now_us)
            if self._at > FILE_BYTES_MAX:
                self._rewrite()
            return True

    def _keep(self, client: str, name: str, time_us: int) -> None:
        names = self._names.setdefault(client, {})
        names[name] = time_us
        while len(names) > NAMES_MAX:
            del names[next(iter(names))]

    def _rewrite(self) -> None:
        """Write the names over what is there; if that fails, the file stays as long as it is."""
        lines = [
            f"{time_us} {client}/{name}\n" for client, names in self._names.items() for name, time_us in names.items()
        ]
        data = "".join(lines).encode()
        end = len(data) + AHEAD_BYTES
        try:
            self._file.pwrite(data, 0)
            zero_fill(self._file, len(data), max(self._at, end))
            self._file.truncate(end)
        except OSError as error:
            logger.warning("%s keeps names of old queries for now (%s)", self._file.path, error)
        else:
            self._at, self._reserved = len(data), end

    def _reserve(self) -> None:
        """Keep space for further names."""
        if self._reserved < self._at + AHEAD_BYTES // 2:
            end = self._at + AHEAD_BYTES
            try:
                zero_fill(self._file, max(self._at, self._reserved), end)
            except OSError as error:
                if not is_disk_full(error):
                    raise  # otherwise the write itself will tell whether it fits
            else:
                self._reserved = end

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()
