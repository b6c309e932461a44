"""The protocols of a kind of table: its core, its capabilities, and the port through which its API reaches a store.

A kind is a small core, `Kind`, and capabilities. The other packages ask for a capability by its protocol, through
`as_streamable` and its like, and never by the name of a kind:

    Streamable     rows have positions; a consumer moves along them       Spark streams
    Loadable       rows are prepared in another process                   Spark writes, bulk loads
    Replaceable    a load replaces the rows in a range of keys            Spark overwrites
    FileReadable   ranges are read from files, without the owner          Spark reads, verify
    RowConditional writes that depend on the LSNs of rows                 compare and set
    Queryable      reads that are not by key: a selector, a top-k search  `Reading.query`
    Countable      its shards are counted without a snapshot              statistics of clients
    Selectable     a selector is read in ranges of keys                   Spark reads
    Derived        tables are computed from others by jobs                rollups
    Serviced       the owner does more for a table than read and write    leases, retention
    Changing       tables can have a change feed                          `table.changes`, Spark streams

The API classes of a kind use `Port` alone, so they are the same in the process that owns the store and in a client.
A table is divided into shards. The rows of a shard are ordered by key (bytes), so that a scan can be divided into key
ranges for several readers. In a kv table these are the user's keys; in a queue, message sequences as eight bytes.

    port            `Port`, and what passes through it
    core            `Kind`, its state machines and their snapshots
    capabilities    the protocols above, and the functions that check for them
    table           the base of the API classes of tables
    tree_machine    the base of state machines whose shard is one LSM tree
    changes         the change feed of a shard, and `Changing`
    deadlines       rows of the shard that expire, which its feed reports as deletes
    change_reading  how a feed is read
"""

from penstock.kinds.capabilities import (
    STATISTICS,
    BatchCounts,
    Countable,
    Derivation,
    Derived,
    ExpectedRow,
    FileKeeping,
    FileReadable,
    Host,
    Loadable,
    OwnFile,
    PreparedRows,
    Queryable,
    QueryContext,
    Replaceable,
    RowConditional,
    SealedFile,
    Selectable,
    Serviced,
    Streamable,
    StreamColumns,
    StreamSource,
    TableService,
    as_loadable,
    as_queryable,
    as_replaceable,
    as_row_conditional,
    as_selectable,
    as_serviced,
    as_streamable,
)
from penstock.kinds.core import (
    Filters,
    InThisProcess,
    Kind,
    Machine,
    MachineContext,
    PieceSnapshot,
    ShardSnapshot,
    Waiting,
)
from penstock.kinds.port import (
    QUERY_BYTES_MAX,
    QUERY_S,
    QUERY_S_MAX,
    BuildContext,
    Conditional,
    Insert,
    Piece,
    Port,
    Reading,
    SnapshotReading,
    partitions_of,
    staged_content,
)
from penstock.kinds.table import (
    DURABLE_S,
    Measured,
    ReadableTable,
    TableSize,
    TableStatistics,
    WritableTable,
    numbers_of,
    statistics_of,
)
from penstock.kinds.tree_machine import ALL_LATER, TreeMachine

__all__ = [
    "ALL_LATER",
    "DURABLE_S",
    "QUERY_BYTES_MAX",
    "QUERY_S",
    "QUERY_S_MAX",
    "STATISTICS",
    "BatchCounts",
    "BuildContext",
    "Conditional",
    "Countable",
    "Derivation",
    "Derived",
    "ExpectedRow",
    "FileKeeping",
    "FileReadable",
    "Filters",
    "Host",
    "InThisProcess",
    "Insert",
    "Kind",
    "Loadable",
    "Machine",
    "MachineContext",
    "Measured",
    "OwnFile",
    "Piece",
    "PieceSnapshot",
    "Port",
    "PreparedRows",
    "QueryContext",
    "Queryable",
    "ReadableTable",
    "Reading",
    "Replaceable",
    "RowConditional",
    "SealedFile",
    "Selectable",
    "Serviced",
    "ShardSnapshot",
    "SnapshotReading",
    "StreamColumns",
    "StreamSource",
    "Streamable",
    "TableService",
    "TableSize",
    "TableStatistics",
    "TreeMachine",
    "Waiting",
    "WritableTable",
    "as_loadable",
    "as_queryable",
    "as_replaceable",
    "as_row_conditional",
    "as_selectable",
    "as_serviced",
    "as_streamable",
    "numbers_of",
    "partitions_of",
    "staged_content",
    "statistics_of",
]
