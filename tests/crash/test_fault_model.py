"""The campaign's model: it takes what is right for right, and sees each thing that can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
from faults.history import Dump, Effect, Event, Message, Operation, Outcome, Reopened, Saw, Word
from faults.model import Model

NOW = 1_000.0
Spoil = Callable[[Dump], object]


def count(number: int) -> str:
    return number.to_bytes(8, "little").decode("latin-1")


def marks(number: int, *, queue: bool = True) -> list[Effect]:
    key, tables = f"m/p/{number:08d}", "a,b,q" if queue else "a,b"
    effects = [Effect("put", table, key, tables) for table in ("a", "b")]
    effects += [Effect("add", table, "n/p", amount=1) for table in ("a", "b")]
    return [*effects, Effect("message", "q", "p", f"p.{number}.0|x")] if queue else effects


def attempt(operation: Operation, word: Word | None, error: str = "", position: object = None) -> list[Event]:
    if word is None:
        return [operation]
    return [operation, Outcome("p", operation.number, word, error, position, NOW)]  # type: ignore[arg-type]


def history() -> list[Event]:
    """A batch, puts that are overwritten and expire, a token in doubt, an append, a table made again, an ack."""
    events = attempt(Operation("p", 1, "batch", marks(1)), "done")
    events += attempt(Operation("p", 2, "single", [Effect("put", "a", "h/p/01", "two")]), "done")
    third = Operation("p", 3, "single", [Effect("put", "a", "h/p/01", "three")])
    events += attempt(third, "unknown", "OutcomeUnknown: ")
    brief = Effect("put", "b", "x/p/1", "brief", ttl_s=10.0)
    events += attempt(Operation("p", 4, "single", [brief], begun_s=NOW), "done")
    events += attempt(Operation("p", 5, "token", marks(5, queue=False), token=5), "unknown", "OutcomeUnknown: ")
    events += attempt(Operation("p", 6, "again", marks(5, queue=False), token=5), "done")
    events += attempt(Operation("p", 7, "append", [Effect("message", "q", "p", "p.7.0|y")]), "done", "", (0, 2))
    events += attempt(Operation("p", 8, "create", table="t_p", birth=8), "done")
    events += attempt(Operation("p", 9, "fill", [Effect("put", "t_p", "f9", "8")], table="t_p", birth=8), "done")
    events += attempt(Operation("p", 10, "ack", messages=[(0, 1)], conditional=True), "done")
    events += attempt(Operation("p", 11, "batch", marks(11, queue=False)), "refused", "Poisoned: ")
    stream = Effect("put", "b", "s/p/00000012", "v")
    events += attempt(Operation("p", 12, "stream", [stream]), "written")
    events += attempt(Operation("p", 13, "flush"), "done")
    whole = [Effect("put", "b", f"w/p/00000014/{part}", "2.v") for part in range(2)]
    return [*events, *attempt(Operation("p", 14, "whole", whole), None), Saw("u", "b", ["s/p/00000012"])]


def correct_dump() -> Dump:
    tables = {
        "a": {"m/p/00000001": "a,b,q", "m/p/00000005": "a,b", "n/p": count(2), "h/p/01": "three"},
        "b": {
            "m/p/00000001": "a,b,q", "m/p/00000005": "a,b", "n/p": count(2), "x/p/1": "brief", "s/p/00000012": "v",
            "w/p/00000014/0": "2.v", "w/p/00000014/1": "2.v",
        },
        "t_p": {"f9": "8"},
    }  # fmt: skip
    queues = {"q": [Message(0, 1, "p.1.0|x"), Message(0, 2, "p.7.0|y")], "r": []}
    return Dump(NOW + 1, NOW + 2, tables, queues, {"worker": [(0, 1), (0, 2)], "taker": [(0, 2)]})


def check(dump: Dump, events: list[Event] | None = None) -> list[str]:
    return Model(["a", "b"], ["q", "r"], ["t_p"]).check([history() if events is None else events], dump)


def test_what_is_right_is_right() -> None:
    assert check(correct_dump()) == []
    other = correct_dump()
    other.tables["a"]["h/p/01"] = "two"  # the unknown put did not happen
    for part in range(2):  # and what a kill cut off neither
        del other.tables["b"][f"w/p/00000014/{part}"]
    assert check(other) == []


def both(name: str, value: str | None) -> Spoil:
    def spoil(dump: Dump) -> None:
        for table in ("a", "b"):
            dump.tables[table].pop(name, None)
            if value is not None:
                dump.tables[table][name] = value

    return spoil


WRONG: dict[str, tuple[Spoil, str]] = {
    "a batch is lost in all tables": (
        lambda dump: [both("m/p/00000001", None)(dump), both("n/p", count(1))(dump), dump.queues["q"].pop(0)],
        "lost: p.1",
    ),
    "a batch is in one table only": (lambda dump: dump.tables["b"].pop("m/p/00000001"), "torn"),
    "the message of a batch is missing": (lambda dump: dump.queues["q"].pop(0), "torn"),
    "a merge counts twice": (lambda dump: dump.tables["a"].update({"n/p": count(3)}), "wrong value"),
    "an old value is back": (lambda dump: dump.tables["a"].pop("h/p/01"), "wrong value"),
    "a row that nobody wrote": (lambda dump: dump.tables["a"].update({"h/p/02": "?"}), "wrong value"),
    "what has not expired is gone": (lambda dump: dump.tables["b"].pop("x/p/1"), "wrong value"),
    "what has expired is there": (lambda dump: setattr(dump, "begun_s", NOW + 60), "wrong value"),
    "a refused batch is there": (
        lambda dump: [both("m/p/00000011", "a,b")(dump), both("n/p", count(3))(dump)],
        "refused, and there",
    ),
    "a flushed write is lost": (lambda dump: dump.tables["b"].pop("s/p/00000012"), "lost: p.12"),
    "half of a put_many": (lambda dump: dump.tables["b"].pop("w/p/00000014/1"), "torn"),
    "a message is there twice": (lambda dump: dump.queues["q"].append(Message(0, 3, "p.7.0|y")), "doubled"),
    "a message is missing in its shard": (
        lambda dump: dump.queues["q"].__setitem__(1, Message(0, 3, "p.7.0|y")),
        "gap",
    ),
    "a message is not where it was said to be": (
        lambda dump: dump.queues.update(q=[Message(0, 1, "p.7.0|y"), Message(0, 2, "p.1.0|x")]),
        "moved",
    ),
    "a message that nobody put": (lambda dump: dump.queues["r"].append(Message(0, 1, "z.1.0|")), "nobody put it"),
    "an acknowledged message comes again": (lambda dump: dump.delivered["taker"].append((0, 1)), "delivered again"),
    "a message never comes": (lambda dump: dump.delivered["taker"].clear(), "never delivered"),
    "a message is gone without its result": (lambda dump: dump.delivered["worker"].pop(), "without its result"),
    "a table is lost": (lambda dump: dump.tables.pop("t_p"), "lost: table t_p"),
    "a row of a dropped table is back": (lambda dump: dump.tables["t_p"].update(f2="2"), "is back"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name: str) -> None:
    spoil, expected = WRONG[name]
    dump = deepcopy(correct_dump())
    spoil(dump)
    assert any(expected in text for text in check(dump)), check(dump)


def test_writes_happen_in_their_order() -> None:
    events: list[Event] = []
    for number in (1, 2):
        effect = Effect("put", "a", f"s/p/{number:08d}", "v")
        events += attempt(Operation("p", number, "stream", [effect]), "written")
    dump = Dump(NOW, NOW, {"a": {"s/p/00000002": "v"}, "b": {}}, {})
    assert any("out of order" in text for text in check(dump, events))
    assert check(dump, [*events[:2], Reopened("p"), *events[2:]]) == []  # what an opening had kept may be gone


def test_a_used_token_is_not_taken_again() -> None:
    model = Model(["a", "b"], ["q", "r"], ["t_p"])
    assert model.check([history()], correct_dump()) == []
    again = attempt(Operation("p", 20, "again", marks(5, queue=False), token=5), "done")
    assert any("taken again" in text for text in model.check([again], correct_dump()))


def test_what_was_seen_stays_the_truth() -> None:
    model = Model(["a", "b"], ["q", "r"], ["t_p"])
    assert model.check([history()], correct_dump()) == []
    assert model.check([], correct_dump()) == []
    dump = correct_dump()
    dump.tables["a"]["h/p/01"] = "two"  # was possible before "three" was seen
    assert any("wrong value" in text for text in model.check([], dump))
