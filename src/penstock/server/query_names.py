"""Names of queries that took a snapshot: a query gets only one, from this owner or an earlier one.

The tasks of a query take its snapshot by its name; the first task creates it. After that snapshot was closed, or its
owner ended, a late task must not get another one: the query would silently mix two LSNs.

    <store>/run/queries     a line for each name: when, in microseconds, and client/name; of the last day

Thread: any; `_lock` guards everything.
Invariant: when a client has too many names, only its own oldest ones are forgotten.
"""

from __future__ import annotations

from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.host.paths import parent

KEPT_US = 24 * 3600 * 1_000_000
NAMES_MAX = 100_000  # of one client
NAME_LENGTH_MAX = 200
FILE_BYTES_MAX = 64 << 20  # then it is rewritten


class QueryNames:
    """The query names that were used."""

    def __init__(self, fs: FileSystem, path: str, clock: Clock) -> None:
        self._clock = clock
        self._lock = threads.lock("server.query_names")
        self._names: dict[str, dict[str, int]] = {}  # guarded by _lock; by client and name, when it was used
        make_dirs(fs, parent(path))
        self._file = fs.open(path, write=True) if fs.exists(path) else fs.create(path)
        self._at = 0
        oldest_us = clock.time_us() - KEPT_US
        for line in self._file.pread(self._file.size(), 0).decode(errors="replace").splitlines():
            time_us, _, full_name = line.partition(" ")
            client, slash, name = full_name.partition("/")
            if not slash:  # the older format, without a client
                client, name = "", client
            if time_us.isdigit() and int(time_us) > oldest_us:
                self._keep(client, name, int(time_us))
        self._rewrite()

    def use(self, name: str, client: str = "") -> bool:
        """Record a name of a client; False if it was used before."""
        if not 0 < len(name) <= NAME_LENGTH_MAX or not name.isascii() or not name.isprintable():
            raise Invalid(f"a query's name has 1 to {NAME_LENGTH_MAX} printable characters")
        with self._lock:
            if name in self._names.get(client, {}):
                return False
            now_us = self._clock.time_us()
            self._write(f"{now_us} {client}/{name}\n")  # not synced: a machine crash ends the query's tasks, too
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
        self._file.truncate(0)
        self._at = 0
        lines = [
            f"{time_us} {client}/{name}\n" for client, names in self._names.items() for name, time_us in names.items()
        ]
        self._write("".join(lines))

    def _write(self, text: str) -> None:
        data = text.encode()
        self._file.pwrite(data, self._at)
        self._at += len(data)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()
