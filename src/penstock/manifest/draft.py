"""Changes to a snapshot that are not yet in the engine.

Every LMDB call releases the interpreter lock and wakes threads that wait for it. So batches are applied here, in
Python, and their rows are written to LMDB together.

Thread: the one that has the writer's turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.manifest.engine import TABLES, ReadView, Transaction


class Draft:
    """A `WriteView` over a `ReadView`."""

    def __init__(self, base: ReadView) -> None:
        self._base = base
        self._rows: dict[str, dict[bytes, bytes | None]] = {table: {} for table in TABLES}  # None: deleted

    def get(self, table: str, key: bytes) -> bytes | None:
        rows = self._rows[table]
        return rows[key] if key in rows else self._base.get(table, key)

    def scan(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        rows: dict[bytes, bytes | None] = dict(self._base.scan(table, start, stop))
        rows.update((k, v) for k, v in self._rows[table].items() if start <= k and (stop is None or k < stop))
        for key in sorted(rows):
            value = rows[key]
            if value is not None:
                yield key, value

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._rows[table][key] = value

    def delete(self, table: str, key: bytes) -> bool:
        there = self.get(table, key) is not None
        self._rows[table][key] = None
        return there

    def write_to(self, transaction: Transaction) -> None:
        """Write the changes to a transaction."""
        for table, rows in self._rows.items():
            for key, value in rows.items():
                if value is None:
                    transaction.delete(table, key)
            puts = [(key, value) for key, value in rows.items() if value is not None]
            if puts:
                transaction.put_many(table, sorted(puts))
