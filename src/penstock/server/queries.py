"""Names of queries that took a snapshot here: each gets one, from this owner or from the one before.

The tasks of a query take its snapshot by its name, and the first of them makes it. When that snapshot is gone, or its
owner, a task that comes late must not get another one: the query would read two moments and nobody would know.

    <store>/run/queries     a line for each name: when, in microseconds, and the name; of the last day

Thread: any; `_lock` guards everything.
"""

from __future__ import annotations

from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.files import FileSystem, make_dirs, parent

KEPT_US = 24 * 3600 * 1_000_000
NAMES_MAX = 100_000
NAME_LENGTH_MAX = 200


class QueryNames:
    """Which names were used."""

    def __init__(self, fs: FileSystem, path: str, clock: Clock) -> None:
        self._clock = clock
        self._lock = threads.lock("server.queries")
        self._names: dict[str, int] = {}  # guarded by _lock; by name, when it was used
        make_dirs(fs, parent(path))
        self._file = fs.open(path, write=True) if fs.exists(path) else fs.create(path)
        oldest_us = clock.time_us() - KEPT_US
        for line in self._file.pread(self._file.size(), 0).decode(errors="replace").splitlines()[-NAMES_MAX:]:
            time_us, _, name = line.partition(" ")
            if time_us.isdigit() and int(time_us) > oldest_us:
                self._names[name] = int(time_us)
        self._file.truncate(0)
        self._at = 0
        self._write("".join(f"{time_us} {name}\n" for name, time_us in self._names.items()))

    def use(self, name: str) -> bool:
        """Note a name; False if it was used before."""
        if not 0 < len(name) <= NAME_LENGTH_MAX or not name.isascii() or not name.isprintable():
            raise Invalid(f"a query's name has 1 to {NAME_LENGTH_MAX} printable characters")
        with self._lock:
            if name in self._names:
                return False
            now_us = self._clock.time_us()
            self._write(f"{now_us} {name}\n")  # not synced: who dies with the machine has no tasks that go on
            self._names[name] = now_us
            while len(self._names) > NAMES_MAX:
                del self._names[next(iter(self._names))]
            return True

    def _write(self, text: str) -> None:
        data = text.encode()
        self._file.pwrite(data, self._at)
        self._at += len(data)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._file.close()
