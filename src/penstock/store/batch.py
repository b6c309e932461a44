"""Writes to several tables as one group: all of it happens, or nothing.

Thread: a batch belongs to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.arguments import whole
from penstock.coordinator import Epoch
from penstock.errors import Invalid, KindMismatch, NotFound, TokenTooOld
from penstock.journal.record import PartitionId, partition_id
from penstock.kinds import Port
from penstock.kv.table import KvTable
from penstock.partition.ledger import Condition, TableInfo, Verdict, encode_condition
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import StagedFile, plain_files
from penstock.registry import check_name, kind_named, kind_of_condition

if TYPE_CHECKING:
    from penstock.queue.table import QueueTable


class StoreBatch:
    """It happens at the end of the `with` block, if that ends well."""

    def __init__(self, port: Port, *, token: tuple[str, int] | None, durable: bool) -> None:
        self._port = port
        self._token = token
        self._durable = durable
        self._gathered = PendingDelta()
        self._conditions: list[tuple[str, bytes]] = []
        self._files: dict[PartitionId, tuple[StagedFile, ...]] = {}
        self._bytes = 0
        self._ended = False
        self.duplicate = False
        self.epoch: Epoch | None = None

    def table(self, name: str) -> Any:
        """A table of any kind that gathers writes for this batch. It must exist."""
        info = self._info(name)
        return kind_named(info.kind, name).table(_BatchPort(self), info, durable=False)  # type: ignore[arg-type]

    def kv(self, name: str) -> KvTable:
        """A kv table that gathers writes for this batch. It must exist."""
        found: KvTable = self._of_kind(name, "kv")
        return found

    def queue(self, name: str) -> QueueTable:
        """A queue that gathers writes for this batch. It must exist."""
        found: QueueTable = self._of_kind(name, "queue")
        return found

    def _of_kind(self, name: str, kind: str) -> Any:
        info = self._info(name)
        if info.kind != kind:
            raise KindMismatch(f"table {name} is of the kind {info.kind}, not {kind}")
        return self.table(name)

    def _info(self, name: str) -> TableInfo:
        self._check_open()
        info = self._port.table(check_name(name))
        if info is None:
            raise NotFound(f"there is no table {name}: make it before the batch")
        return info

    def adopt(self, name: str, files: Sequence[StagedFile], shard: int = 0) -> None:
        """Take in files that were staged for a shard of a table, built, and `sealed`; they are seen together."""
        info = self._info(name)
        shard = whole(shard, f"a shard of table {info.name}", 0, info.shards - 1)
        self.add_files(partition_id(info.table, shard), files)

    def add_files(self, partition: PartitionId, files: Sequence[StagedFile]) -> None:
        """Take in files of a shard whose table the caller has found already: see `adopt`."""
        self._check_open()
        self._files[partition] = plain_files([*self._files.get(partition, ()), *files])

    def add_section(self, partition: PartitionId, section: Any, size: int) -> None:
        """Add writes that were prepared elsewhere."""
        self._check_open()
        self._gathered.begin()[partition] = section
        self._gathered.open = None  # it is whole: what is written next stands behind it
        self._bytes += size

    def require(self, condition: str, argument: bytes) -> None:
        """Let all of it depend on a condition of a kind; the kind's own API calls this."""
        self._check_open()
        if type(condition) is not str or type(argument) is not bytes:
            raise Invalid("a condition is a name and bytes, as a kind makes them")
        self._conditions.append((condition, argument))

    def __enter__(self) -> StoreBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._ended:
            self.commit()
        self._ended = True

    def _check_open(self) -> None:
        if self._ended:
            raise Invalid("this batch has ended: begin another")

    def commit(self) -> None:
        """Write it. `duplicate` says afterwards whether it had happened before."""
        self._check_open()
        self._ended = True
        if self._files and self._token is not None and self._port.was_used(self._token):
            self.duplicate = True  # known without a look at the files
            return
        group = self._group()
        if group is None:
            return
        if not group.condition and not self._durable:
            self.epoch = self._port.submit(group, self._bytes)
            return
        self.epoch = self._port.settle(group, self._bytes)
        if group.verdict is Verdict.TOKEN_TOO_OLD:
            raise TokenTooOld(f"token {self._token} is below the window of its producer: nothing was written")
        if group.verdict is Verdict.REFUSED:
            condition, argument = self._conditions[0]
            raise kind_of_condition(condition).refusal(condition, argument)
        self.duplicate = group.verdict is Verdict.DUPLICATE

    def _group(self) -> PendingGroup | None:
        bound = self._token is not None or bool(self._conditions)
        condition = encode_condition(Condition(self._token, tuple(self._conditions))) if bound else b""
        group = PendingGroup(condition)
        for gathered in self._gathered.groups:
            for partition, section in gathered.sections.items():
                group.sections[partition] = (*group.sections.get(partition, ()), section)
        for partition, files in self._files.items():
            if partition in group.sections:
                raise Invalid("a batch either writes to a shard or adopts files for it")
            group.sections[partition] = self._port.accept(partition, files)
        return group if group.sections or bound else None


class _BatchPort:
    """Gathers what a table writes; reads are not offered."""

    def __init__(self, batch: StoreBatch) -> None:
        self._batch = batch

    def write(self, partition: PartitionId, insert: Any, size: int, a: Any, b: Any) -> Epoch:
        self._batch._check_open()
        insert(self._batch._gathered, partition, a, b)
        self._batch._bytes += size
        return Epoch(0)

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        for partition, part in group.sections.items():
            self._batch.add_section(partition, part, 0)
        self._batch._bytes += size
        return Epoch(0)

    def flush(self, epoch: int | None, timeout_s: float = 0.0, *, table: int | None = None) -> None:
        """A batch is durable at its end."""

    def time_us(self) -> int:
        return self._batch._port.time_us()

    def __getattr__(self, name: str) -> Any:
        return _refuse_reads


def _refuse_reads(*_: Any, **__: Any) -> NoReturn:
    raise Invalid("a batch takes writes only: read from the store's table")
