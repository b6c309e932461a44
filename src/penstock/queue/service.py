"""The owner's service for one queue: `append`, deliveries, positions of consumers, retention.

Thread: any; its only state is that of its `Deliveries`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import CorruptionError, Invalid, OutcomeUnknown, PartitionPaused, PenstockError, WaitExpired
from penstock.journal.partitions import PartitionId
from penstock.kinds import Host, partitions_of
from penstock.lsm.maintenance import COMPANION
from penstock.partition.ledger_records import TableInfo
from penstock.queue import section
from penstock.queue.calls import (
    ConsumerPosition,
    ConsumerSummary,
    QueueCall,
    QueueTotals,
    ShardBounds,
    StreamTotals,
    decode_call,
)
from penstock.queue.delivery import Deliveries
from penstock.queue.headers import header_bytes
from penstock.queue.machine import QueueMachine
from penstock.queue.options import Retention, decode_queue_options, has_headers, no_headers
from penstock.queue.positions import decode_row, parse_row_key, rows_of
from penstock.queue.retention import strictest, trim_before
from penstock.queue.validation import check_request

logger = logging.getLogger(__name__)


def _retention_of(info: TableInfo) -> Retention:
    """Return a queue's retention. If it cannot be read, everything is kept: messages may still be needed."""
    try:
        return decode_queue_options(info.options).retention
    except CorruptionError as error:
        logger.warning("queue %s keeps everything, because its retention cannot be read: %s", info.name, error.reason)
        return Retention()


GET_WAIT_S = 5.0  # of a get, for a shard that is late; longer if its own timeout is


class QueueService:
    """The owner's service for a queue."""

    def __init__(self, info: TableInfo, host: Host) -> None:
        self._info = info
        self._host = host
        self._partitions = partitions_of(info)
        self._deliveries = Deliveries(info, host, [self._machine(partition) for partition in self._partitions])
        self._answers: dict[str, Callable[[QueueCall], Any]] = {
            "append": self._append,
            "seek": self._seek,
            "bounds": self._bounds,
            "statistics": self._statistics,
            "get": self._deliveries.get,
            "nack": self._deliveries.nack,
            "extend": self._deliveries.extend,
            "leave": self._deliveries.leave,
            "consumers": self._consumers,
            "positions": self._positions,
            "advance": self._advance,
        }

    def _machine(self, partition: PartitionId) -> QueueMachine:
        machine = self._host.machine(partition)
        assert isinstance(machine, QueueMachine)
        return machine

    def _latest(self) -> TableInfo:
        """Return the table with its options as they are now: they may have been altered."""
        return self._host.port.table(self._info.name) or self._info

    def call(self, name: str, argument: bytes) -> bytes:
        return msgspec.msgpack.encode(self.perform(name, decode_call(argument)))

    def perform(self, name: str, request: QueueCall) -> Any:
        answer = self._answers.get(name)
        if answer is None:
            raise Invalid(f"a queue has no call {name!r}")
        check_request(self._info, request)
        if name == "get":  # a consumer that got one message of a batch must find the others, too
            deadline_s = self._host.clock.monotonic_s() + max(GET_WAIT_S, request.timeout_s or 0.0)
            for partition in self._partitions:  # all of them within one wait
                self._host.machine(partition, max(0.0, deadline_s - self._host.clock.monotonic_s()))
        return answer(request)

    # -- messages

    def _append(self, call: QueueCall) -> tuple[int, int]:
        """Write a message, wait until it is durable and applied, and return its (LSN, sequence)."""
        receipt, port = section.Receipt(), self._host.port
        message: section.Message = (call.payload, call.key, call.time_us)
        size = len(call.payload) + len(call.key or b"") + 256
        if call.headers:
            if not has_headers(self._latest().options):
                raise no_headers(self._info.name)
            message, size = (*message[:3], call.headers), size + header_bytes(call.headers)
        epoch = port.write(self._partitions[call.shard], section.put, size, message, receipt)
        port.wait_applied(epoch)  # type: ignore[attr-defined]
        puts = receipt.section
        if puts.first is None:  # another thread applies it
            refusal = self._not_numbered(call.shard)
            if puts.first is None:
                raise refusal
        return puts.lsn, puts.first + receipt.offset

    def _not_numbered(self, shard: int) -> OutcomeUnknown:
        """Wait until a durable message is applied, and return the error if it is not; `NotFound` if it was dropped."""
        reason = "it has not applied it yet"
        try:
            self._machine(self._partitions[shard])  # waits
        except (PartitionPaused, WaitExpired) as behind:  # not a refusal: it is applied when the shard resumes
            reason = str(behind)
        name = self._info.name
        return OutcomeUnknown(f"a message for shard {shard} of {name} is durable and has no number yet ({reason})")

    def _seek(self, call: QueueCall) -> int:
        machine = self._machine(self._partitions[call.shard])
        return max(machine.first, machine.queue.seek_time(call.time_us or 0))

    def _bounds(self, _: QueueCall) -> list[ShardBounds]:
        return [ShardBounds(machine.first, machine.next) for machine in map(self._machine, self._partitions)]

    def _statistics(self, call: QueueCall) -> QueueTotals:
        numbers = [self._machine(partition).queue.statistics() for partition in self._partitions]
        files, size = sum(shard.files for shard in numbers), sum(shard.bytes for shard in numbers)
        return QueueTotals(self._bounds(call), files, size, self._positions(call))

    def _advance(self, call: QueueCall) -> dict[int, int]:
        """Return the end of a batch from `positions`: within `count` and `bytes_max`, shared among the shards."""
        ends, rows, size = {}, call.count, call.bytes_max
        waiting = sorted(
            (self._machine(self._partitions[shard]).queue.next_sequence - start, shard, start)
            for shard, start in call.positions
        )
        for number, (ahead, shard, start) in enumerate(waiting):  # shortest first: the others get its unused share
            left = len(waiting) - number
            count = min(ahead, max(1, rows // left)) if call.count and rows > 0 else (0 if call.count else ahead)
            share = size // left if call.bytes_max else 0
            end, used = self._within(shard, start, count, share if call.bytes_max else None)
            ends[shard] = end
            rows, size = rows - (end - start), max(0, size - used)
        return ends

    def _within(self, shard: int, start: int, count: int, bytes_max: int | None) -> tuple[int, int]:
        """Return the end and size of at most `count` messages and `bytes_max` bytes, but at least one message."""
        if bytes_max is None or count <= 0:
            return start + max(0, count), 0
        queue, end, used = self._machine(self._partitions[shard]).queue, start, 0
        while end < start + count and used < bytes_max:
            left = max(1, min(8 << 20, bytes_max - used))
            batches = queue.read(end, limit_messages=start + count - end, limit_bytes=left)
            used += sum(batch.messages.size_bytes() for batch in batches)
            if used > bytes_max and end > start:
                break
            end = batches[-1].next
        return end, used

    def _positions(self, call: QueueCall) -> list[ConsumerPosition]:
        """Return the positions of one consumer, or of all."""
        positions = []
        for key, row in self._host.ledger_rows(rows_of(self._info.table_id)):
            shard, consumer = parse_row_key(self._info.table_id, key)
            if shard < COMPANION and call.consumer in ("", consumer):  # above it: of its change feed
                position, machine = decode_row(row), self._machine(self._partitions[shard])
                position = position if position.mode == "streamed" else position.raised(machine.first)
                lag = max(0, machine.next - max(position.floor, machine.first) - int(position.flags().sum()))
                positions.append(ConsumerPosition(consumer, shard, position.mode, position.floor, lag))
        return positions

    def _consumers(self, call: QueueCall) -> list[ConsumerSummary]:
        """Return all consumers that have a position, or that were seen since the store was opened."""
        bounds, (last_seen_us, leased) = self._bounds(call), self._deliveries.activity()
        totals = self._host.stream_totals(self._info)
        by_name: dict[str, dict[int, ConsumerPosition]] = {name: {} for name in last_seen_us}
        for position in self._positions(call):
            by_name.setdefault(position.consumer, {})[position.shard] = position
        return [
            ConsumerSummary(
                name,
                mode := next((position.mode for position in positions.values()), "new"),
                {
                    shard: positions[shard].floor if shard in positions else each.first
                    for shard, each in enumerate(bounds)
                },
                sum(
                    positions[shard].lag if shard in positions else each.next - each.first
                    for shard, each in enumerate(bounds)
                ),
                leased.get(name, 0),
                last_seen_us.get(name),
                totals.get(name, StreamTotals()) if mode == "streamed" else None,
            )
            for name, positions in sorted(by_name.items())
        ]

    # -- conditions

    def admit(self, name: str, data: bytes) -> None:
        self._deliveries.admit(name, data)

    # -- retention

    def maintain(self) -> None:
        """Trim by the retention, then remove unneeded files. A failing shard does not stop the others."""
        self._deliveries.maintain()
        failure: Exception | None = None
        latest = self._latest()
        retention = strictest(_retention_of(latest), latest.storage_options.retention)
        for shard in range(len(self._partitions)):
            try:
                self._maintain(shard, retention)
            except (OSError, PenstockError) as error:
                failure = error
        if failure is not None:
            raise failure

    def _maintain(self, shard: int, retention: Retention) -> None:
        machine = self._machine(self._partitions[shard])
        floors = self._floors(shard) if retention.acknowledged else []
        before = trim_before(machine, retention, floors, self._host.port.time_us())
        if before > machine.first:
            self._host.port.write(self._partitions[shard], section.trim, 64, before, None)
        machine.drop_files()

    def _floors(self, shard: int) -> list[int]:
        """Return the floors of all consumers in a shard; 1 for a consumer that has no row for it yet."""
        floors: dict[str, int] = {}
        for key, row in self._host.ledger_rows(rows_of(self._info.table_id)):
            row_shard, consumer = parse_row_key(self._info.table_id, key)
            if row_shard >= COMPANION:
                continue  # of its change feed, which has a retention of its own
            floors.setdefault(consumer, 1)
            if row_shard == shard:
                floors[consumer] = decode_row(row).floor
        return list(floors.values())

    def has_leases(self) -> bool:
        return self._deliveries.has_leases()

    def close(self) -> None:
        self._deliveries.close()
