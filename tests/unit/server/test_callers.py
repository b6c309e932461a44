"""Who has to go when there are too many: never a client for a stranger, never the few for the many."""

from __future__ import annotations

import resource

import pytest

from penstock.server import callers as callers_module
from penstock.server.callers import Caller, Callers, RefusedError, budgets


class Door:
    """Callers by name, and who was told to go."""

    def __init__(self, strangers_max: int = 3, clients_max: int = 2) -> None:
        self.callers = Callers(strangers_max, clients_max)
        self.disconnects: list[str] = []

    def stranger(self, name: str, address: str = "a") -> Caller:
        caller = Caller(address, lambda _: self.disconnects.append(name))
        self.callers.enter(caller)
        return caller

    def client(self, name: str, address: str = "a", *, requests: int = 0, idle_since_s: float = 0.0) -> Caller:
        caller = self.stranger(name, address)
        caller.requests, caller.idle_since_s = requests, idle_since_s
        self.callers.recognise(caller)
        return caller


def test_the_oldest_stranger_goes_first_and_once() -> None:
    door = Door()
    for name in ("1", "2", "3", "4", "5"):
        door.stranger(name)
    assert door.disconnects == ["1", "2"]
    door.stranger("6")
    assert door.disconnects == ["1", "2", "3"]


def test_one_address_does_not_push_out_another() -> None:
    door = Door()
    door.stranger("few", "b")
    for number in range(50):
        door.stranger(str(number), "many")
    assert "few" not in door.disconnects
    assert len(door.disconnects) == 48


def test_strangers_never_push_out_a_client() -> None:
    door = Door()
    clients = [door.client("c1"), door.client("c2")]
    for number in range(50):
        door.stranger(str(number))
    assert not {"c1", "c2"} & set(door.disconnects)
    assert all(client.is_client for client in clients)


def test_an_idle_client_makes_room_and_a_busy_one_does_not() -> None:
    door = Door()
    door.client("busy", requests=1, idle_since_s=1.0)
    idle = door.client("idle", idle_since_s=5.0)
    door.client("new", requests=1)
    assert door.disconnects == ["idle"]
    door.callers.leave(idle)
    with pytest.raises(RefusedError):
        door.client("one too many")
    assert door.disconnects == ["idle"]


def test_the_address_with_the_most_clients_gives_room() -> None:
    door = Door(clients_max=3)
    door.client("alone", "b", idle_since_s=1.0)
    door.client("m1", "many", idle_since_s=3.0)
    door.client("m2", "many", idle_since_s=2.0)
    door.client("m3", "many")
    assert door.disconnects == ["m2"]  # of the two, the longer idle


def test_a_stranger_has_a_deadline_and_a_client_has_none() -> None:
    door = Door()
    late, client = door.stranger("late"), door.client("known")
    door.callers.expire(late)
    door.callers.expire(client)
    door.callers.expire(late)
    assert door.disconnects == ["late"]


def test_bytes_move_with_who_becomes_a_client_and_end_with_him(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "STRANGERS_BYTES_MAX", 10)
    door = Door()
    first, second = door.stranger("first"), door.stranger("second")
    door.callers.add_bytes(first, 9)
    with pytest.raises(RefusedError):
        door.callers.add_bytes(second, 20)
    door.callers.leave(second)
    door.callers.recognise(first)
    assert (door.callers.bytes(clients=False), door.callers.bytes(clients=True)) == (0, 9)
    door.callers.leave(first)
    assert (door.callers.bytes(clients=False), door.callers.bytes(clients=True), len(door.callers)) == (0, 0, 0)


@pytest.mark.parametrize(("descriptors", "used_max"), [(256, 128), (1_024, 400), (1 << 20, 3 * 320)])
def test_the_store_keeps_most_descriptors(monkeypatch: pytest.MonkeyPatch, descriptors: int, used_max: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    strangers, clients = budgets()
    assert strangers >= 8
    assert clients >= 8
    assert 3 * (strangers + clients) <= used_max
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert budgets() == (callers_module.STRANGERS_MAX, callers_module.CLIENTS_MAX)
