"""The messages between clients and owners, as values, and their limits.

Thread: values.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.partition.ledger_records import CONDITION_BYTES_MAX, TableInfo
from penstock.partition.reference import StagedFile
from penstock.registry import SHARDS_MAX

PROTOCOL = "1"
READS_HEADER, LINEARIZABLE = "penstock-reads", "linearizable"  # of a client that wants its reads confirmed
PROCESS_HEADER = "penstock-process"  # a name that a local client gives itself, for the owner's limits
MESSAGE_BYTES_MAX = 80 << 20  # of a request; the largest value has 64 MiB
ANSWER_BYTES_MAX = 256 << 20
SMALL_BYTES_MAX = 1 << 20  # of a request with names, numbers and a key or two
RESULTS_BYTES_MAX = 8 << 20  # of the results of an offer
GROUPS_MAX = 512  # in one message: a repeated one must be within the window of tokens
SECTIONS_MAX = 65_536  # in all groups of one message
FILES_MAX = 65_536  # the same, of sections that are files
KEYS_MAX = 10_000  # of one lookup
RESULTS_MAX = 10_000  # of one offer
WAIT_S_MAX = 30.0  # of one request that waits for records: a longer wait is several requests
RANGES_MAX = SHARDS_MAX  # of one table
TABLES_MAX = 1_024  # of one batch
PAGE_BYTES = 4 << 20  # of a scan
PIECE_BYTES = 4 << 20  # of a file that is sent
VIEW_S_MAX = 30.0  # that one request waits for a view; clients ask again

KeyRange = tuple[int, bytes, bytes | None]  # partition, start, end


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A request, tagged with its class name."""


class Hello(_Message, frozen=True):
    """Ask which store the owner has."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `Hello`."""

    identity: bytes  # in the store's files
    path: str
    detached: bool
    durability: str
    uuid: bytes  # of the store
    takes_writes: bool = True  # a member of a cluster does while it leads


class ListTables(_Message, frozen=True):
    """List all tables."""


class FindTable(_Message, frozen=True):
    """Find a table by name; the answer has one or none."""

    name: str


class ReadTime(_Message, frozen=True):
    """Read the store's time."""


class Lookup(_Message, frozen=True):
    """Look up the values of keys of a shard; live, or in a snapshot.

    The answer has a value or None for each of the first keys, as many as fit, at least one. Ask for the rest.
    """

    snapshot: str
    partition: int
    keys: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


class LookupRow(_Message, frozen=True):
    """Look up a row of a shard; live, or in a snapshot. The answer has its value and its LSN, or is None."""

    snapshot: str
    partition: int
    key: bytes


class CutPieces(_Message, frozen=True):
    """Split a range of a shard of a snapshot into pieces."""

    snapshot: str
    partition: int
    count: int
    start: bytes = b""
    end: bytes | None = None


class CutRanges(_Message, frozen=True):
    """Ask for the keys at which to split ranges of a table for tasks that read them; live, or in a snapshot.

    Without `bytes_max`, about `count` parts, the same number of each range. Otherwise a multiple of `count` (the number
    of parallel readers), shared among the ranges by size: hardly any above `bytes_max`, and few below `bytes_min`.
    """

    snapshot: str
    ranges: Annotated[list[KeyRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]
    count: int
    bytes_min: int = 0
    bytes_max: int = 0


class PlanBatch(_Message, frozen=True):
    """Ask for the state of the tables a batch writes to, and of the table it is streamed from, if any."""

    tables: Annotated[list[str], msgspec.Meta(max_length=TABLES_MAX)]
    source: str = ""
    consumer: str = ""  # whose position to return
    start: Annotated[
        list[tuple[int, int]], msgspec.Meta(max_length=SHARDS_MAX)
    ] = []  # by shard; the answer has the end
    rows_max: int = 0  # of a batch from there; 0: no limit
    bytes_max: int = 0
    begin: str = ""  # where a stream begins, as the text of an option; then the answer has this position
    changes: bool = False  # whether the source is the change feed of a table whose rows can be streamed, too


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """The positions of a streamed table: sequences by shard."""

    table: TableInfo
    earliest: dict[int, int]
    latest: dict[int, int]  # of the next message to be appended
    position: dict[int, int]  # of the consumer that was named
    end: dict[int, int]  # of a batch from `start`, or from the earliest if that is later


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `PlanBatch`."""

    time_us: int  # the store's
    tables: list[TableInfo]  # those that exist
    source: SourceState | None  # None: there is no such table, or none was named


class CallService(_Message, frozen=True):
    """Call a service of a table's kind; the kind defines name and argument."""

    table: int
    name: str
    argument: bytes


class CreateTable(_Message, frozen=True):
    """Create a table if it does not exist."""

    name: str
    kind: str
    shards: int
    options: bytes
    storage: bytes = b""
    encrypted: bool | None = None


class DropTable(_Message, frozen=True):
    """Delete a table."""

    name: str


class AlterTable(_Message, frozen=True):
    """Replace the options of a table, if they are still `before`."""

    table: int
    before: bytes
    options: bytes


class ConfigureTable(_Message, frozen=True):
    """Replace the storage options of a table, if they are still `before`."""

    table: int
    before: bytes
    storage: bytes


class DescribeTable(_Message, frozen=True):
    """Describe a table."""

    name: str


class WaitForChange(_Message, frozen=True):
    """Wait until the description of a table is of a later generation than `after`."""

    name: str
    after: int
    timeout_s: float


class DrainTable(_Message, frozen=True):
    """Refuse new rows of a table, and put all that was written into its files."""

    name: str
    timeout_s: float


class ReactivateTable(_Message, frozen=True):
    """Let a table that was drained take writes again."""

    name: str


class TriggerTask(_Message, frozen=True):
    """Run a background task now."""

    task: str


class ListTasks(_Message, frozen=True):
    """List the names of the background tasks."""


class CompactTable(_Message, frozen=True):
    """Merge a table into as few files as possible; `timeout_s`: for other work on it to end."""

    name: str
    timeout_s: float


class ListTroubles(_Message, frozen=True):
    """List the acknowledged writes that cannot be read."""


class ListJobs(_Message, frozen=True):
    """List the background work of the store."""


class RetryJob(_Message, frozen=True):
    """Enqueue a failed job once more; the answer is the number of the new one."""

    job: int


class RunJobs(_Message, frozen=True):
    """Do the background work of a table that is due; the answer is the number of compactions."""

    name: str
    timeout_s: float


class ListChunks(_Message, frozen=True):
    """List the files of a table."""

    name: str


class CheckStore(_Message, frozen=True):
    """Read every file of the store, and report what is damaged."""


class BackupStore(_Message, frozen=True):
    """Back the store up into a folder of the owner's machine; `keep`: how many backups stay there."""

    target: str
    keep: int | None


class ArchiveStore(_Message, frozen=True):
    """Make an archive run."""


class EvictFiles(_Message, frozen=True):
    """Remove archived files of a table, or of all, from the folder, except `local_bytes` of each table."""

    name: str | None
    local_bytes: int


class RehydrateFiles(_Message, frozen=True):
    """Fetch evicted files of a table, or of all, into the folder."""

    name: str | None


class VerifyArchive(_Message, frozen=True):
    """Read the archived objects of a table, or of all."""

    name: str | None


class CollectArchive(_Message, frozen=True):
    """Delete archived objects that nothing names."""


class WaitFor(_Message, frozen=True):
    """Wait until tables, by number, have applied every record up to an LSN; the answer is the LSN they reached."""

    lsn: int
    tables: list[int]
    timeout_s: float


class ResumeTable(_Message, frozen=True):
    """Let a paused table try again."""

    name: str


class KeepSnapshot(_Message, frozen=True):
    """Copy the files of a table, so that it can be repaired."""

    name: str


class DropSnapshot(_Message, frozen=True):
    """Remove the copy of a table's files."""

    name: str


class RepairTable(_Message, frozen=True):
    """Replace the files of a table by their copy."""

    name: str


class ReadMetrics(_Message, frozen=True):
    """Read the store's metrics in Prometheus' text format."""


class ReadStatistics(_Message, frozen=True):
    """Read the statistics of the store."""


class AwaitView(_Message, frozen=True):
    """Wait for a view with a higher applied epoch than `after`; with a `timeout_s` of 0, read the newest."""

    after: int
    timeout_s: float


class ReadStorage(_Message, frozen=True):
    """Return how the files of a table are written, to a client that reads or builds some itself."""

    table: int


class StorageReply(msgspec.Struct, frozen=True, array_like=True):
    """How the files of a table are written."""

    codecs: list[tuple[str, int]]  # by level of the tree: the codec, and the level of zstd
    key: bytes | None  # of an encrypted table


class RotateKeys(_Message, frozen=True):
    """Wrap the keys of all encrypted tables with the newest master key."""


class StageFiles(_Message, frozen=True):
    """Reserve names for files that the client builds."""

    partition: int
    count: int
    lease_s: float


class SendFile(_Message, frozen=True):
    """Write bytes of a staged file, for a client that cannot access the store's folder."""

    partition: int
    chunk_id: int
    file_name: str
    offset: int
    data: bytes


class AskToken(_Message, frozen=True):
    """Ask whether a token was used."""

    producer: str
    number: int


class TakeSnapshot(_Message, frozen=True):
    """Take a snapshot at one LSN, held while it is used and for `lease_s` after.

    With the name of a `query`: the one snapshot of that query, taken by its first request.
    """

    lease_s: float
    query: str = ""


class JoinSnapshot(_Message, frozen=True):
    """Use a snapshot that another client took."""

    snapshot: str


class CloseSnapshot(_Message, frozen=True):
    """Close a snapshot."""

    snapshot: str


class CloseScan(_Message, frozen=True):
    """Close a scan before its end."""

    scan: str


class TakeOffer(_Message, frozen=True):
    """Take work for a driver that runs `slots` parts at once, if there is any."""

    slots: int


class KeepOffer(_Message, frozen=True):
    """Renew an offer that is being worked on."""

    offer: str


class FinishOffer(_Message, frozen=True):
    """Deliver the packed result of each part of an offer."""

    offer: str
    results: Annotated[list[bytes], msgspec.Meta(max_length=RESULTS_MAX)]


class FailOffer(_Message, frozen=True):
    """Report that the work of an offer failed."""

    offer: str
    reason: str


class ReadOffered(_Message, frozen=True):
    """Read bytes of an offer's input file, for a driver that cannot access the store's folder."""

    offer: str
    name: str
    offset: int


class WriteOffered(_Message, frozen=True):
    """Write bytes of an offer's output file."""

    offer: str
    name: str
    offset: int
    data: bytes


class SnapshotHandle(msgspec.Struct, frozen=True, array_like=True):
    """A client's handle of a snapshot."""

    snapshot: str
    lsn: int
    time_us: int
    tables: list[TableInfo]


class SentSection(msgspec.Struct, frozen=True, array_like=True):
    """A section of a group: bytes encoded by a kind, or files."""

    partition: int
    payload: bytes
    files: Annotated[list[StagedFile], msgspec.Meta(max_length=FILES_MAX)] | None = None


class SentGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group. A `plain` one holds independent writes that were batched together."""

    condition: bytes
    plain: bool
    sections: list[SentSection]


class Write(_Message, frozen=True):
    """Write groups, in order. `again`: an answer was lost, so some of them may have happened."""

    groups: list[SentGroup]
    again: bool


class ReceivedWrite(Write, frozen=True, tag="Write"):
    """A `Write` as received: `groups_of` decodes its groups."""

    groups: msgspec.Raw  # type: ignore[assignment]
    again: bool


class UncheckedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A `SentGroup` whose sections are counted but not decoded."""

    condition: Annotated[bytes, msgspec.Meta(max_length=CONDITION_BYTES_MAX)]
    plain: bool
    sections: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=SECTIONS_MAX)]


LEAVING = "Gone"  # a fault: the owner is yielding, and did nothing
ENDING = "Ending"  # a fault: the store was closed during the request


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True):
    """An error as it is sent."""

    name: str
    message: str
    detail: list[Any] = []


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a group: judged, or refused before anything was written."""

    verdict: int
    fault: ErrorMessage | None = None
    happened: bool = False  # a duplicate, because an earlier sending of this group was accepted
    refused_by: int | None = None  # the index of the condition that refused it


class Outcomes(msgspec.Struct, frozen=True, array_like=True):
    """The outcomes of the first groups of a message; the rest was not processed."""

    outcomes: list[Outcome]


OtherRequest = (
    Hello
    | ListTables
    | FindTable
    | ReadTime
    | Lookup
    | LookupRow
    | CutPieces
    | CutRanges
    | PlanBatch
    | CallService
    | CreateTable
    | DropTable
    | AlterTable
    | ConfigureTable
    | DescribeTable
    | WaitForChange
    | DrainTable
    | ReactivateTable
    | TriggerTask
    | ListTasks
    | CompactTable
    | ListTroubles
    | ListJobs
    | RetryJob
    | RunJobs
    | ListChunks
    | CheckStore
    | BackupStore
    | ArchiveStore
    | EvictFiles
    | RehydrateFiles
    | VerifyArchive
    | CollectArchive
    | WaitFor
    | ResumeTable
    | KeepSnapshot
    | DropSnapshot
    | RepairTable
    | ReadMetrics
    | ReadStatistics
    | AwaitView
    | ReadStorage
    | RotateKeys
    | StageFiles
    | SendFile
    | AskToken
    | TakeSnapshot
    | JoinSnapshot
    | CloseSnapshot
    | CloseScan
    | TakeOffer
    | KeepOffer
    | FinishOffer
    | FailOffer
    | ReadOffered
    | WriteOffered
)
Request = OtherRequest | Write


class Scan(_Message, frozen=True):
    """Begin to read a range; the client names the scan, and asks for more pages by that name."""

    scan: str
    snapshot: str
    partition: int
    start: bytes
    end: bytes | None
    arrow: bool  # record batches as the kind makes them; otherwise keys and values
    reverse: bool = False


class ScanRanges(_Message, frozen=True):
    """Begin to read several ranges of one table at one LSN, as record batches, each with its range's number."""

    scan: str
    snapshot: str
    ranges: Annotated[list[KeyRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]


class RunQuery(_Message, frozen=True):
    """Begin a query of a table's kind; its pages are read like those of a scan."""

    scan: str
    snapshot: str
    table: int
    name: str
    argument: bytes
    timeout_s: float  # for each batch


class More(_Message, frozen=True):
    """Read the next page of a scan or a query."""

    scan: str


Begin = Scan | ScanRanges | RunQuery
Reading = Begin | More
