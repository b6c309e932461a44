"""The kind `queue`: messages in order, numbered in each shard.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from penstock.arguments import flag, in_short
from penstock.errors import CorruptionError, Invalid, KindMismatch, LeaseLost, PenstockError, PositionConflict
from penstock.host.files import FileSystem
from penstock.kinds import (
    BatchCounts,
    BuildContext,
    FileKeeping,
    FileReadable,
    Filters,
    Host,
    Kind,
    Loadable,
    MachineContext,
    OwnFile,
    Piece,
    Port,
    PreparedRows,
    Reading,
    SealedFile,
    Serviced,
    Streamable,
    StreamColumns,
)
from penstock.kinds.changes import ChangeOptions, Changing, change_options
from penstock.manifest.records import RetentionPolicy
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.reference import StagedFile
from penstock.queue import section
from penstock.queue.chain import QueueSettings
from penstock.queue.changes import change_schema, read_changes
from penstock.queue.machine import KEY, QueueMachine, sequence_of
from penstock.queue.options import (
    QueueOptions,
    Retention,
    decode_queue_options,
    encode_queue_options,
    feed_options,
    has_headers,
    queue_options,
)
from penstock.queue.pieces import read_piece
from penstock.queue.positions import ACK, CONDITIONS, MOVE, SEQUENCE_MAX, Ack, Move, argument, read_argument
from penstock.queue.reading import rows_in_files
from penstock.queue.service import QueueService
from penstock.queue.staged import MessageLoader, bundle, load_schema
from penstock.queue.table import QueueTable, filtered_sequence_range
from penstock.queue.validation import (
    READ_ONLY_CALLS,
    REPEATABLE_CALLS,
    check_call,
    check_condition,
    check_options,
    receive,
    waits,
    weight,
)
from penstock.queue.view import QueueView, in_table_schema, table_schema


class QueueKind(Kind, Streamable, Loadable, FileReadable, FileKeeping, Serviced, Changing):
    """The kind `queue`."""

    name = "queue"
    options_default = encode_queue_options(QueueOptions())
    settings = QueueSettings()
    conditions = CONDITIONS
    columns = StreamColumns("shard", "sequence", "payload", carried=("key", "timestamp", "headers"))
    staged_suffix = ".arrow"
    read_only_calls = READ_ONLY_CALLS
    repeatable_calls = REPEATABLE_CALLS

    def options(self, retention: Retention | None, *, headers: bool, changes: bool | ChangeOptions = False) -> bytes:
        """Return the options of a queue; `Invalid` if they are not options."""
        return encode_queue_options(queue_options(retention, flag(headers, "headers"), change_options(changes)))

    def check_made(self, info: TableInfo, retention: Retention | None, *, headers: bool) -> None:
        """Raise `KindMismatch` if an existing queue has other options than those requested."""
        if retention is not None and decode_queue_options(info.options).retention != queue_options(retention).retention:
            raise KindMismatch(f"queue {info.name} has another retention: use its alter(retention=...) to change it")
        if headers and not has_headers(info.options):
            raise KindMismatch(f"queue {info.name} takes no headers: call its alter(headers=True)")

    def encode(self, part: Any) -> bytes:
        return section.encode(part)

    def decode(self, payload: bytes) -> section.Encoded | section.Trim:
        return section.decode(payload)

    def weight(self, payload: bytes) -> int:
        return weight(payload)

    def receive(self, payload: bytes, options: bytes) -> section.Encoded | section.Trim:
        return receive(payload, options)

    def check_condition(self, info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
        check_condition(info, condition, argument, own=own)

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        return check_call(info, argument)

    def waits(self, name: str, argument: bytes) -> bool:
        return waits(name, argument)

    def check_options(self, options: bytes) -> None:
        check_options(options)

    def check_retention(self, policy: RetentionPolicy) -> None:
        """Accept every limit."""

    def check_altered(self, info: TableInfo, options: bytes) -> None:
        if has_headers(info.options) and not has_headers(options):
            raise Invalid(f"queue {info.name} takes headers, and its messages keep them: create another queue")
        if self.change_options(info.options) != self.change_options(options):
            raise Invalid(f"the change feed of queue {info.name} was chosen at its creation: create another queue")

    def frees_space(self, part: Any) -> bool:
        return isinstance(part, section.Trim)

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, context: MachineContext) -> QueueMachine:
        return QueueMachine(descriptor, context, feed_options(options))

    def change_options(self, options: bytes) -> ChangeOptions | None:
        return feed_options(options)

    def change_schema(self, options: bytes) -> Any:
        return change_schema(options)

    def read_changes(self, data: bytes, options: bytes) -> tuple[bytes, Any]:
        return read_changes(data, options)

    def nothing(self) -> section.Trim:
        return section.Trim(1)

    def service(self, info: TableInfo, host: Host) -> QueueService:
        return QueueService(info, host)

    def refusal(self, condition: str, argument: bytes) -> PenstockError:
        if condition == ACK:
            _, ack = read_argument(argument, Ack)
            assert isinstance(ack, Ack)
            return LeaseLost(f"consumer {ack.consumer} no longer holds these messages: nothing was written")
        if condition == MOVE:
            _, move = read_argument(argument, Move)
            assert isinstance(move, Move)
            return PositionConflict(
                f"consumer {move.consumer} is not at the start of this batch, because somebody else moved it: "
                "nothing was written; stop, and begin at its position"
            )
        return KindMismatch(f"the condition {condition} was refused")

    def source(self, port: Port, info: TableInfo) -> QueueTable:
        return QueueTable(port, info)

    def sequence_key(self, sequence: int) -> bytes:
        return KEY.pack(sequence)

    def move(
        self,
        info: TableInfo,
        consumer: str,
        ranges: Sequence[tuple[int, int, int]],
        counts: BatchCounts = BatchCounts(),  # noqa: B008 - immutable
    ) -> tuple[str, bytes]:
        return MOVE, argument(info.table_id, Move(consumer, list(ranges), counts))

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> QueueTable:
        return QueueTable(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> QueueView:
        return QueueView(port, info)

    def schema(self, options: bytes) -> Any:
        return table_schema(options)

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        return in_table_schema(batch, shard, table_schema(options))

    def parse_key(self, text: str) -> bytes:
        if not text.isdecimal() or len(text) > 19 or int(text) >= SEQUENCE_MAX:
            raise Invalid(f"{in_short(text)} is not the sequence of a message: give a whole number")
        return KEY.pack(int(text))

    def key_range(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        return filtered_sequence_range(filters, QueueTable(port, info), shard)

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        return load_schema(input_schema, options)

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return MessageLoader(info, context).run(batches)

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return bundle(loads, info, context)

    def check_staged(self, machine: QueueMachine, files: Sequence[StagedFile]) -> None:
        machine.check_staged(files)

    def own_files(self, machine: QueueMachine) -> list[OwnFile]:
        return machine.own_files()

    def sealed_files(self, machine: QueueMachine) -> list[SealedFile]:
        return machine.sealed_files()

    def damaged_files(self, machine: QueueMachine) -> list[tuple[str, str]]:
        return machine.damaged_files()

    def rows_in_files(self, fs: FileSystem, folder: str, identity: bytes) -> Iterator[Any]:
        return rows_in_files(fs, folder, identity)

    def read_piece(
        self, piece: Piece, root: str, identity: bytes, columns: Collection[str] | None = None
    ) -> Iterator[Any] | None:
        assert piece.end is not None  # every piece of a queue has an end
        return read_piece(piece.detail, sequence_of(piece.start), sequence_of(piece.end), root, identity)

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        try:  # every record has a checksum: reading it checks it
            batches = self.read_piece(piece, root, identity)
            if batches is None:
                return None
            deque(batches, maxlen=0)
            return []
        except CorruptionError as error:
            return [(error.path, f"byte {error.offset}: {error.reason}")]
