"""Append-only files of records: the ground the journal, partition logs and queues stand on.

    record    the bytes of one record, and what a checksum must cover
    segment   one file of records: header, append, seal, tail scan
    chain     which segments of a folder are alive, from their names alone
    log       many segments as one sequence: append, sync, roll, truncate, recover
    cursor    reading from any index

docs/format/log.md gives the bytes.
"""

from penstock.log.cursor import Cursor
from penstock.log.log import Log, LogEnd, LogSettings, LogStatistics, Repair
from penstock.log.record import Index, Record

__all__ = ["Cursor", "Index", "Log", "LogEnd", "LogSettings", "LogStatistics", "Record", "Repair"]
