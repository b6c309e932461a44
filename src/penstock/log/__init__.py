"""Append-only files of records, under the journal, partition logs and queues.

    record    the bytes of one record and its checksum
    segment   one file of records: header, append, seal, tail scan
    chain     which segments of a folder are live, from their names
    log       segments as one sequence: append, sync, roll, truncate, recover
    cursor    reads from any index
    damage    reads a closed log to its end: which segments are damaged, and what can still be read
    settings  sizes of files; what a log reports

docs/format/log.md gives the bytes.
"""

from penstock.log.cursor import Cursor
from penstock.log.log import Log
from penstock.log.record import Index, Record
from penstock.log.settings import LogEnd, LogSettings, LogStatistics, Repair

__all__ = ["Cursor", "Index", "Log", "LogEnd", "LogSettings", "LogStatistics", "Record", "Repair"]
