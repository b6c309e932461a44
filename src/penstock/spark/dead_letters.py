"""Dead letters: the records that made a batch fail, each with its reason.

Thread: pure functions; frames are made in the driver.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import replace

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from penstock import errors
from penstock.errors import FixTheCall, Invalid, KindMismatch, PenstockError, PositionConflict, StreamFailed
from penstock.kinds import StreamColumns, as_streamable
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named
from penstock.spark.isolation import RowPosition
from penstock.spark.loading import check_schema
from penstock.spark.table_ref import PlannedTable

REASON = "reason"
REASON_CHARACTERS = 500
ERRORS = "penstock.errors."  # before the name of an error, as tracebacks print it
_RAISED = re.compile(rf"{re.escape(ERRORS)}(\w+)(?:: (.*))?")
_TRACEBACK = "Traceback (most recent call last):"
_CONDITION = re.compile(r"(?:^|\n|Exception: )(\[[A-Z][A-Z0-9_.]+\] )")  # Spark's name of an error
_SHARED = re.compile(r"CONCURRENT_(QUERY|STREAM_LOG_UPDATE)")  # two queries with one checkpoint
_END = re.compile(r"\n(?:\s*\n|==|\tat |\s*File |JVM stacktrace|Caused by|[\w.$]+(?:Exception|Error): )")


def reason_of(failure: BaseException | str) -> str:
    """Return the class and the message of an error in one line, without the lines of code it passed through."""
    text = str(failure)
    if isinstance(failure, BaseException) and not isinstance(failure, PySparkException | Py4JError):
        text = f"{type(failure).__name__}: {text}"
    elif _TRACEBACK in text:  # of a Python function in a task
        lines = text.rpartition(_TRACEBACK)[2].strip("\n").split("\n")
        raised = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), 0)
        text = "\n".join(lines[raised:])
    elif named := _CONDITION.search(text):
        text = text[named.start(1) :]
    return " ".join(_END.split(text.strip(), maxsplit=1)[0].split())[:REASON_CHARACTERS] or type(failure).__name__


def is_transient(failure: BaseException | str) -> bool:
    """Whether the batch may succeed later, so that no record is to blame; checks the error and that of a task."""
    raised = [getattr(errors, name, Exception) for name, _ in _RAISED.findall(str(failure))]
    return any(
        issubclass(kind, PenstockError) and not issubclass(kind, FixTheCall) for kind in [type(failure), *raised]
    )


def in_one_line(failure: Exception, context: str) -> Exception:
    """Return the error to raise for a stream that failed: the cause first, in one line."""
    if not isinstance(failure, PySparkException | Py4JError):
        return failure
    if _SHARED.search(str(failure)):
        return PositionConflict(f"another driver runs with this checkpoint ({context}): give each stream its own")
    return raised_in_task(str(failure)) or StreamFailed(f"{reason_of(failure)} ({context})")


def raised_in_task(text: str) -> PenstockError | None:
    """Return the error of Penstock's that a task raised, from the text of Spark's; None if there is none."""
    raised = [(name, message) for name, message in _RAISED.findall(text) if message and hasattr(errors, name)]
    if not raised:
        return None
    name, message = raised[-1]
    error: PenstockError = getattr(errors, name)(message)
    return error


def letter_columns(table: PlannedTable, source: TableInfo) -> StreamColumns:
    """Return the columns of the dead-letter table; `Invalid`, before any work, if it takes no messages of `source`."""
    name = table.info.name
    try:
        columns = as_streamable(table.kind, table.info).columns
        check_schema(table, StructType([StructField(columns.payload, StringType())]))
    except (Invalid, KindMismatch) as error:
        raise Invalid(f"dead_letter is {name}, which takes no messages ({error}): give a queue") from None
    taken = table.kind.schema(table.info.options).names
    for column in set(columns.carried).intersection(_columns_of(source)).difference(taken):
        raise Invalid(
            f"messages of {source.name} have {column}, and dead_letter is {name}, which takes none: "
            f"call store.queue({name!r}).alter({column}=True)"
        )
    return replace(columns, carried=tuple(column for column in columns.carried if column in taken))


def _columns_of(source: TableInfo) -> list[str]:
    names: list[str] = kind_named(source.kind, source.name).schema(source.options).names
    return names


def dead_letters(frame: DataFrame, source: str, columns: StreamColumns, letter: StreamColumns) -> DataFrame:
    """Return dead letters: each row as JSON with the reason and its source."""
    names = frame.columns
    if columns.payload not in names or REASON not in names:
        raise Invalid(f"dead letters need the columns {columns.payload} and {REASON}, not {', '.join(names)}")
    parts = [F.lit(source).alias("source"), F.col(REASON)]
    parts += [
        F.col(name).alias(alias)
        for name, alias in ((columns.shard, "shard"), (columns.sequence, "sequence"))
        if name in names
    ]
    payload = F.col(columns.payload).cast("binary")
    parts += [F.base64(payload).alias("payload_base64"), F.try_validate_utf8(payload.cast("string")).alias("payload")]
    carried = [F.col(name) for name in letter.carried if name in names]
    return frame.select(F.to_json(F.struct(*parts)).alias(letter.payload), *carried)


def split_off(
    frame: DataFrame, columns: StreamColumns, reasons: Mapping[RowPosition, str]
) -> tuple[DataFrame, DataFrame]:
    """Return a frame without the messages that have a reason, and those messages with it."""
    by_shard: dict[int, list[int]] = {}
    for shard, sequence in reasons:
        by_shard.setdefault(shard, []).append(sequence)
    broken = " OR ".join(
        f"(`{columns.shard}` = {shard} AND `{columns.sequence}` IN ({', '.join(map(str, sequences))}))"
        for shard, sequences in by_shard.items()
    )
    fields = f"array<struct<`{columns.shard}` int, `{columns.sequence}` bigint, `{REASON}` string>>"
    listed = json.dumps(
        [
            {columns.shard: shard, columns.sequence: sequence, REASON: reason}
            for (shard, sequence), reason in reasons.items()
        ]
    )
    reason_rows = frame.sparkSession.range(1).select(F.inline(F.from_json(F.lit(listed), fields)))
    return frame.where(f"NOT ({broken})"), frame.join(F.broadcast(reason_rows), [columns.shard, columns.sequence])


def dead_letter_payload(message: bytes) -> bytes:
    """Return the original payload of a dead letter.

    >>> letter = b'{"reason": "not JSON", "payload": "x", "payload_base64": "eA=="}'
    >>> penstock.spark.dead_letter_payload(letter)
    b'x'
    """
    return base64.b64decode(json.loads(message)["payload_base64"])
