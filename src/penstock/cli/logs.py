"""Where the records of `logging` go while a command runs: stderr, as lines for people or as JSON.

Thread: any; `logging` has its own lock.
"""

from __future__ import annotations

import logging
import sys
import time
from enum import Enum

import msgspec


class LogLevel(Enum):
    """How grave a record must be to be written."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(Enum):
    """How a record is written."""

    text = "text"
    json = "json"


def start_logging(level: LogLevel, form: LogFormat) -> None:
    """Write the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form is LogFormat.json else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.value.upper())


class TextLines(logging.Formatter):
    """`12:03:44.123 info penstock.store flushed table users`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{moment}.{int(record.msecs):03d} {record.levelname.lower():7} {record.name} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonLines(logging.Formatter):
    """One JSON object a line: time (seconds since 1970), level, logger, message, and error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()
