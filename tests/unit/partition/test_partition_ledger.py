"""The ledger: windows of tokens against a set, verdicts that are kept, tables, conditions of kinds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptionError, Invalid
from penstock.journal.record import Group, JournalRecord, Section, SegmentedRecordHeader
from penstock.lsm.tree import Tree
from penstock.partition.ledger import Judgement, Ledger
from penstock.partition.ledger_records import (
    FIRST_TABLE,
    LEDGER,
    Condition,
    Create,
    Drop,
    ForgetVerdicts,
    KindCondition,
    LedgerOp,
    Verdict,
    encode_condition,
    encode_ops,
)
from penstock.partition.tokens import PRODUCER_IDLE_US, TOKEN_WINDOW, check_token
from penstock.testing import FakeClock


def make(conditions: Mapping[str, KindCondition] | None = None) -> Ledger:
    return Ledger(Tree([], lambda meta: None, clock=FakeClock()), conditions)  # type: ignore[arg-type, return-value]


def tokens(*pairs: tuple[str, int]) -> JournalRecord:
    return JournalRecord(1, 1, tuple(Group((), encode_condition(Condition(token))) for token in pairs))


def command(*operations: LedgerOp) -> JournalRecord:
    return JournalRecord(1, 1, (Group((Section(SegmentedRecordHeader(LEDGER), encode_ops(*operations)),)),))


numbers = st.one_of(st.integers(0, 5), st.integers(1_000, 1_100), st.integers(2_000, 2_200), st.integers(0, 1 << 62))


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("pq"), numbers), min_size=1, max_size=4), max_size=30))
def test_tokens_against_a_set(records: list[list[tuple[str, int]]]) -> None:
    ledger = make()
    used: dict[str, set[int]] = {"p": set(), "q": set()}
    judged: list[tuple[JournalRecord, tuple[Verdict, ...]]] = []
    for lsn, pairs in enumerate(records, 1):
        expected = []
        for producer, number in pairs:
            highest = max(used[producer], default=-1)
            if number in used[producer] and number >= highest - TOKEN_WINDOW:
                expected.append(Verdict.DUPLICATE)
            elif number < highest - TOKEN_WINDOW:
                expected.append(Verdict.TOKEN_TOO_OLD)
            else:
                expected.append(Verdict.ACCEPTED)
                used[producer].add(number)
        record = tokens(*pairs)
        assert list(ledger.judge(record, lsn).verdicts) == expected
        judged.append((record, tuple(expected)))
    for lsn, (record, verdicts) in enumerate(judged, 1):  # told again what they were told
        again = ledger.judge(record, lsn)
        assert again.repeated
        assert again.verdicts == ledger.verdicts(record, lsn) == verdicts


def test_tables_come_and_go() -> None:
    ledger = make()
    first = ledger.judge(command(Create("t", "kv", 2, b"x"), Create("u", "kv", 1, b"")), 1)
    assert [info.table_id for info in first.created] == [FIRST_TABLE, FIRST_TABLE + 1]
    assert not ledger.judge(command(Create("t", "kv", 5, b"y")), 2).created  # there is one
    assert ledger.table("t") == first.created[0]
    assert [info.name for info in ledger.judge(command(Drop("t"), Drop("nobody")), 3).dropped] == ["t"]
    assert (
        ledger.judge(command(Create("t", "kv", 1, b"")), 4).created[0].table_id == FIRST_TABLE + 2
    )  # never used twice
    assert [info.name for info in ledger.tables()] == ["t", "u"]
    assert Ledger(ledger.tree).tables() == ledger.tables()


def test_verdicts_are_forgotten_on_demand_only() -> None:
    ledger = make()
    records = [tokens(("p", number)) for number in range(1, 4)]
    for lsn, record in enumerate(records, 1):
        ledger.judge(record, lsn)
    ledger.judge(command(ForgetVerdicts(3)), 4)
    assert ledger.verdicts(records[2], 3) == (Verdict.ACCEPTED,)
    with pytest.raises(CorruptionError):
        ledger.verdicts(records[0], 1)
    assert ledger.judge(tokens(("p", 1)), 5).verdicts == (Verdict.DUPLICATE,)  # tokens stay


def test_a_refused_group_leaves_nothing() -> None:
    """Nothing of it: neither its token nor what another of its conditions wrote."""

    def takes(argument: bytes, get: object, put: object) -> Verdict:
        put(b"x" + argument[8:], b"1")  # type: ignore[operator]
        return Verdict.REFUSED if argument[8:] == b"no" else Verdict.ACCEPTED

    ledger = make({"takes": takes})
    ledger.judge(command(Create("a", "kv", 1, b"")), 1)

    def group(word: bytes, number: int = 1, table: int = FIRST_TABLE) -> JournalRecord:
        conditions = (("takes", table.to_bytes(8, "big") + word),)
        return JournalRecord(1, 1, (Group((), encode_condition(Condition(("p", number), conditions))),))

    assert ledger.judge(group(b"no"), 2).verdicts == (Verdict.REFUSED,)
    assert ledger.tree.get(b"xno") is None
    assert ledger.judge(group(b"yes"), 3).verdicts == (Verdict.ACCEPTED,)
    assert ledger.tree.get(b"xyes") == b"1"
    assert ledger.judge(group(b"yes"), 4).verdicts == (Verdict.DUPLICATE,)
    assert ledger.judge(group(b"other", 2, FIRST_TABLE + 1), 5).verdicts == (Verdict.REFUSED,), "there is no such table"
    ledger.judge(command(Drop("a")), 6)
    assert ledger.judge(group(b"late", 3), 7).verdicts == (Verdict.REFUSED,), "its table was dropped"
    assert ledger.tree.get(b"xlate") is None


def test_a_refusal_names_its_condition() -> None:
    def agrees(argument: bytes, get: object, put: object) -> Verdict:
        if argument[8:] == b"bug":
            raise ZeroDivisionError
        return Verdict.REFUSED if argument[8:] == b"no" else Verdict.ACCEPTED

    ledger = make({"agrees": agrees})
    ledger.judge(command(Create("a", "kv", 1, b"")), 1)

    def group(*words: bytes, table: int = FIRST_TABLE) -> Group:
        others = tuple(("agrees", table.to_bytes(8, "big") + word) for word in words)
        return Group((), encode_condition(Condition(None, others)))

    record = JournalRecord(
        1, 1, (group(b"yes", b"yes", b"no"), group(b"yes"), Group(()), group(b"yes", b"no", b"no"), group(b"bug"))
    )
    judged = ledger.judge(record, 2)
    refused, accepted = Verdict.REFUSED, Verdict.ACCEPTED
    assert judged.verdicts == (refused, accepted, accepted, refused, refused)
    assert judged.refused_by == {0: 2, 3: 1, 4: 0}
    assert ledger.judge(record, 2).refused_by == judged.refused_by, "as after an interrupt"
    absent = JournalRecord(
        1, 1, (group(b"yes", table=FIRST_TABLE + 1), Group((), encode_condition(Condition(("p", 1)))))
    )
    assert ledger.judge(absent, 3).refused_by == {0: 0}
    undecodable = JournalRecord(1, 1, (group(b"no"), Group((), b"\xc1")))
    assert ledger.judge(undecodable, 4) == Judgement((refused, refused), refused_by={0: 0})


@pytest.mark.parametrize(
    "token", [None, "p", ("p",), ("p", "1"), ("", 1), ("p" * 513, 1), ("p", -1), ("p", 1 << 63), (b"p", 1)]
)
def test_tokens_of_the_wrong_shape(token: object) -> None:
    with pytest.raises(Invalid):
        check_token(token)


def test_idle_producers_are_forgotten_by_the_time_of_records() -> None:
    ledger = make()
    ledger.judge(tokens(("old", 1)), 1)
    late = JournalRecord(PRODUCER_IDLE_US, 1, tokens(("busy", 1)).groups)
    ledger.judge(late, 2)
    forget = command(ForgetVerdicts(1))
    ledger.judge(JournalRecord(PRODUCER_IDLE_US + 1, 1, forget.groups), 3)
    assert not ledger.is_token_used("old", 1)
    assert ledger.is_token_used("busy", 1)
