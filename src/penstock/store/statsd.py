"""Metrics sent to a StatsD agent, beside what Prometheus reads.

Every line is `penstock.NAME:VALUE|TYPE|#label:value,...`: StatsD with the tags that agents of Datadog, Telegraf, Vector
and the `statsd_exporter` of Prometheus know. A counter is sent as its difference to what was sent last, a histogram as
the differences of its count and its sum. Datagrams may be lost; what could not be sent at all is in the next ones.

Thread: any; `_lock` is held while metrics are sent.
Invariants: (1) nothing waits: the agent's address needs no look-up, and a datagram is sent or refused at once. (2) no
datagram is longer than DATAGRAM_BYTES_MAX, unless one line alone is. (3) no socket is left open between two calls.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.metrics import PREFIX, Distribution, MetricFamily, Metrics
from penstock.scheduler.task import Outcome

logger = logging.getLogger(__name__)

DATAGRAM_BYTES_MAX = 1_432  # fits a packet of Ethernet
INTERVAL_S = 10.0
_ADDRESS = re.compile(r"(localhost|\[[0-9a-fA-F:]+\]|[0-9.]+):([0-9]{1,5})")
_SPECIAL = re.compile(r"[|,#:@\s]")
_Totals = dict[tuple[str, tuple[str, ...]], float]  # of counters, by name and values of labels


def parse_agent(address: object) -> tuple[str, int]:
    """Return the IP address and the port of an agent; `Invalid` unless it is given as ADDRESS:PORT."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    try:
        if match is None or not 1 <= int(match[2]) <= 65_535:
            raise ValueError
        host = "127.0.0.1" if match[1] == "localhost" else str(ip_address(match[1].strip("[]")))
    except ValueError:
        raise Invalid(
            f"statsd is the IP address and the port of an agent, like 127.0.0.1:8125, not {address!r:.100}"
        ) from None
    return host, int(match[2])


class StatsdSender:
    """Sends the metrics of a store to an agent."""

    def __init__(self, metrics: Metrics, agent: tuple[str, int]) -> None:
        self._metrics = metrics
        self._agent = agent
        self._lock = threads.lock("store.statsd")
        self._sent: _Totals = {}  # guarded by _lock: counters as they were sent last

    def send(self) -> Outcome:
        """Send all gauges, and what was counted since the last time; `OSError` if the system refuses."""
        families = self._metrics.families()
        family = socket.AF_INET6 if ":" in self._agent[0] else socket.AF_INET
        with self._lock, socket.socket(family, socket.SOCK_DGRAM) as sender:
            counted: _Totals = {}
            datagrams = list(packed(self._lines(families, counted)))
            sender.setblocking(False)
            for datagram, totals in datagrams:  # not connected: an agent that is away is not an error
                sender.sendto(datagram, self._agent)
                self._sent |= totals  # after an error only the others are sent again
            self._sent = counted  # without dropped tables
        return None

    def send_last(self) -> None:
        """Send what is left when the store is closed; a failure loses only that."""
        try:
            self.send()
        except OSError as error:
            logger.warning("the last metrics were not sent to the StatsD agent %s:%d (%s)", *self._agent, error)

    def _lines(self, families: Iterable[MetricFamily], counted: _Totals) -> Iterator[tuple[bytes, _Totals]]:
        for family in families:
            for values, value in family.samples.items():
                tags = _tags(family.labels, values)
                if isinstance(value, Distribution):
                    totals = [(f"{family.name}_count", float(value.total)), (f"{family.name}_sum", value.sum)]
                elif family.kind == "counter":
                    totals = [(family.name, float(value))]
                else:
                    yield _gauge_line(family.name, float(value), tags), {}
                    continue
                for name, total in totals:
                    key = (name, values)
                    counted[key] = total
                    new = total - self._sent.get(key, 0.0)
                    if new > 0:
                        yield _line(name, new, "c", tags), {key: total}


def packed(lines: Iterable[tuple[bytes, _Totals]]) -> Iterator[tuple[bytes, _Totals]]:
    """Join lines to datagrams, each with the totals of its counters."""
    datagram, totals = b"", _Totals()
    for line, more in lines:
        if datagram and len(datagram) + 1 + len(line) > DATAGRAM_BYTES_MAX:
            yield datagram, totals
            datagram, totals = b"", _Totals()
        datagram = line if not datagram else datagram + b"\n" + line
        totals |= more
    if datagram:
        yield datagram, totals


def _gauge_line(name: str, value: float, tags: str) -> bytes:
    """Return the line of a gauge. In StatsD a sign means a change, so one below 0 is first set to 0, in one piece."""
    line = _line(name, value, "g", tags)
    return _line(name, 0.0, "g", tags) + b"\n" + line if value < 0 else line


def _line(name: str, value: float, kind: str, tags: str) -> bytes:
    number = str(int(value)) if value.is_integer() else repr(value)
    return f"{PREFIX.removesuffix('_')}.{name}:{number}|{kind}{tags}".encode()


def _tags(labels: Iterable[str], values: Iterable[str]) -> str:
    pairs = [f"{label}:{_SPECIAL.sub('_', value)}" for label, value in zip(labels, values, strict=True)]
    return f"|#{','.join(pairs)}" if pairs else ""
