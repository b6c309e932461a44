"""Metrics for a StatsD agent: what is sent, how it is packed, and an agent that is away or an address that is wrong."""

from __future__ import annotations

import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Invalid
from penstock.host.metrics import Histogram, MetricFamily, Metrics, MetricSamples, counter, gauge, histogram
from penstock.store.statsd import DATAGRAM_BYTES_MAX, StatsdSender, packed, parse_agent

LINE = re.compile(r"penstock\.[a-z_0-9]+:-?[0-9.e+-]+\|[cg](\|#[a-z_]+:[^|,#:@\s]*(,[a-z_]+:[^|,#:@\s]*)*)?")


@pytest.fixture
def agent() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(30)
        yield listener


def receive(agent: socket.socket) -> list[str]:
    """All lines that have arrived; waits for the first."""
    lines: list[str] = []
    agent.settimeout(30)
    while True:
        try:
            datagram = agent.recv(1 << 16)
        except BlockingIOError:
            return lines
        assert len(datagram) <= DATAGRAM_BYTES_MAX
        lines += datagram.decode().split("\n")
        agent.setblocking(False)


def sender_of(agent: socket.socket, families: list[MetricFamily]) -> StatsdSender:
    metrics = Metrics()
    metrics.collect_from(lambda: families)
    return StatsdSender(metrics, agent.getsockname())


def test_counters_are_differences_and_gauges_are_set(agent: socket.socket) -> None:
    took, families = Histogram(), list[MetricFamily]()
    sender = sender_of(agent, families)
    took.observe(0.5)
    families[:] = [
        counter("writes", "", {("a|b", "0"): 3}, ("table", "shard")),
        gauge("open", "", 2.5),
        gauge("ahead", "", -4),
        histogram("seconds", "", took.read()),
    ]
    sender.send()
    assert receive(agent) == [
        "penstock.writes_total:3|c|#table:a_b,shard:0",
        "penstock.open:2.5|g",
        "penstock.ahead:0|g",
        "penstock.ahead:-4|g",
        "penstock.seconds_count:1|c",
        "penstock.seconds_sum:0.5|c",
    ]
    families[:] = [counter("writes", "", {("a|b", "0"): 10}, ("table", "shard")), gauge("open", "", 0)]
    sender.send()
    assert receive(agent) == ["penstock.writes_total:7|c|#table:a_b,shard:0", "penstock.open:0|g"]
    sender.send()
    assert receive(agent) == ["penstock.open:0|g"]


def test_what_could_not_be_sent_is_sent_later(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender = sender_of(agent, [counter("writes", "", 3)])

    def refused(*_: Any) -> int:
        raise OSError(101, "Network is unreachable")

    with monkeypatch.context() as broken:
        broken.setattr(socket.socket, "sendto", refused)
        with pytest.raises(OSError, match="unreachable"):
            sender.send()  # the scheduler counts it and tries again
        with caplog.at_level(logging.WARNING):
            sender.send_last()
        assert "were not sent to the StatsD agent 127.0.0.1:" in caplog.text
    sender.send()
    assert receive(agent) == ["penstock.writes_total:3|c"]


def test_no_datagram_is_counted_twice_when_a_later_one_is_refused(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is full refuses the rest, at each attempt again: an agent would add up the first ones each time."""
    totals: MetricSamples = {(f"table_{number:0100d}",): number + 1 for number in range(30)}
    families = [counter("writes", "", totals, ("table",))]
    sender, sendto, left = sender_of(agent, families), socket.socket.sendto, [0]

    def full(self: socket.socket, data: bytes, address: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return sendto(self, data, address)

    monkeypatch.setattr(socket.socket, "sendto", full)
    counts: Counter[str] = Counter()
    for datagrams in (1, 1, 0, 9):
        left[0] = datagrams
        with suppress(BlockingIOError):
            sender.send()
        for line in receive(agent) if datagrams else ():
            counts[line.partition("table:")[2]] += int(line.partition(":")[2].partition("|")[0])
    assert counts == {table: value for (table, *_), value in totals.items()}


def test_datagrams_fit_a_packet() -> None:
    datagrams = list(packed((b"x" * length, {("n", ("a",)): float(length)}) for length in (700, 700, 32, 2_000, 1)))
    assert [len(datagram) for datagram, _ in datagrams] == [1_401, 32, 2_000, 1]
    assert [total for _, totals in datagrams for total in totals.values()] == [700, 32, 2_000, 1]
    assert list(packed([])) == []


def test_a_store_sends_all_its_metrics_and_the_last_at_close(tmp_path: Path, agent: socket.socket) -> None:
    settings = penstock.StoreSettings(statsd=f"127.0.0.1:{agent.getsockname()[1]}", task_intervals_s={"statsd": 3600.0})
    with penstock.open(tmp_path / "store", settings=settings) as store:
        assert "statsd" in store.tasks()
        lines = receive(agent)  # the first run is at once
        store.kv("users").put(b"k", b"v", durable=True)
        exported = set(re.findall(r"^# TYPE penstock_(\S+)", store.metrics.exposition(), re.MULTILINE))
    lines += receive(agent)
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    names = {line.partition(":")[0].removeprefix("penstock.") for line in lines}
    assert {re.sub(r"_(count|sum)$", "", name) if name not in exported else name for name in names} <= exported
    assert {"coordinator_writes_total", "partition_applied_index", "fsync_latency_seconds_count"} <= names
    assert any("|#table:users,shard:0" in line for line in lines)


def test_an_agent_that_is_away_costs_nothing(tmp_path: Path) -> None:
    settings = penstock.StoreSettings(statsd="127.0.0.1:9", task_intervals_s={"statsd": 0.01})
    with penstock.open(tmp_path / "store", settings=settings) as store:
        store.kv("users").put(b"k", b"v", durable=True)
        store.trigger("statsd")
        assert 'penstock_scheduler_task_failures_total{task="statsd"} 0' in store.metrics.exposition()


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("127.0.0.1:8125", ("127.0.0.1", 8125)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65_535)),
    ],
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert parse_agent(address) == parsed


@pytest.mark.parametrize(
    "address", ["", "agent:8125", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "1.2.3:1", "::1:8125", 8125, b"", None]
)
def test_wrong_addresses(address: Any) -> None:
    with pytest.raises(Invalid, match="like 127.0.0.1:8125"):
        parse_agent(address)
    if address is not None:
        with pytest.raises(Invalid, match="like 127.0.0.1:8125"):
            penstock.StoreSettings(statsd=address)
