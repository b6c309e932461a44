"""The contract of kinds notices kinds that break it: each of these has one mistake, and one test that must fail."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import test_kinds

from penstock.errors import Invalid
from penstock.kinds import BuildContext, MachineContext, PreparedRows, QueryContext
from penstock.lsm.memtable import Edit
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import Entry, PartitionDescriptor
from penstock.partition.reference import StagedFile
from penstock.registry import KINDS
from penstock.testing.kinds.accounts import section
from penstock.testing.kinds.accounts.kind import AccountsKind
from penstock.testing.kinds.accounts.machine import AMOUNT, AccountsMachine, AccountsSnapshot


class ForgetsToCheck(AccountsKind):
    def receive(self, payload: bytes, options: bytes) -> section.Bookings:
        try:
            return section.decode(payload)
        except Exception as error:
            raise Invalid("malformed") from error


class RaisesAnything(AccountsKind):
    def decode(self, payload: bytes) -> section.Bookings:
        if not payload:
            raise IndexError("no count")
        return section.decode(payload)


class WeighsNothing(AccountsKind):
    def weight(self, payload: bytes) -> int:
        return 0


class TakesAnyOptions(AccountsKind):
    def check_options(self, options: bytes) -> None: ...


class OtherSchema(AccountsKind):
    def schema(self, options: bytes) -> Any:
        return pa.schema([("account", pa.string()), ("amount", pa.int32()), ("lsn", pa.int64())])


class _Machines(AccountsKind):
    machine: type[AccountsMachine]

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, context: MachineContext) -> AccountsMachine:
        tree = context.maintenance.open_tree(descriptor.table_id, descriptor.shard, descriptor.folder)
        return self.machine(tree, context.maintenance, descriptor)


class GuessesInApply(_Machines):
    class machine(AccountsMachine):
        def apply(self, entry: Entry) -> None:
            bookings = [one for part in entry.sections for one in section.decode(part.payload)]
            puts = {account + random.randbytes(13): AMOUNT.pack(amount) for account, amount in bookings}
            self.tree.apply(Edit(lsn=entry.lsn, time_us=entry.time_us, puts=puts))


class RefusesInApply(_Machines):
    class machine(AccountsMachine):
        def apply(self, entry: Entry) -> None:
            if any(amount == 2 for part in entry.sections for _, amount in section.decode(part.payload)):
                raise Invalid("an amount of 2 is not booked")
            super().apply(entry)


class AppliesTheFirstSection(_Machines):
    class machine(AccountsMachine):
        def apply(self, entry: Entry) -> None:
            super().apply(Entry(entry.lsn, entry.time_us, entry.sections[:1]))


class ForgetsOnReplay(_Machines):
    class machine(AccountsMachine):
        def apply(self, entry: Entry) -> None:
            super().apply(entry if entry.decoded else Entry(entry.lsn, entry.time_us, ()))


class SnapshotsAreLive(_Machines):
    class machine(AccountsMachine):
        def snapshot(self) -> AccountsSnapshot:
            tree = self.tree

            class Live(AccountsSnapshot):
                def rows(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
                    return tree.scan(start, end)

            return Live(self.tree.snapshot())


class QueriesOneShard(AccountsKind):
    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[AccountsSnapshot], context: QueryContext
    ) -> Iterator[Any]:
        return super().query(info, name, argument, shards[:1], context)


class QueriesForEver(AccountsKind):
    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[AccountsSnapshot], context: QueryContext
    ) -> Iterator[Any]:
        class Patient:
            lsn = time_us = 0

            def check(self) -> None: ...

        return super().query(info, name, argument, shards, Patient())


class TakesAnyQuery(AccountsKind):
    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None: ...


class LoadsHalf(AccountsKind):
    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return super().load((batch.slice(0, batch.num_rows // 2) for batch in batches), info, context)


class LoadsAnyColumns(AccountsKind):
    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        return input_schema


class TakesAnyFile(AccountsKind):
    def check_staged(self, machine: AccountsMachine, files: Sequence[StagedFile]) -> None: ...


MUTANTS = [
    (ForgetsToCheck, "test_sections_that_break_a_rule_are_refused"),
    (ForgetsToCheck, "test_a_client_is_refused_what_breaks_a_rule"),
    (RaisesAnything, "test_damaged_sections_raise_one_error"),
    (WeighsNothing, "test_sections_survive_their_bytes"),
    (TakesAnyOptions, "test_options_are_checked"),
    (OtherSchema, "test_what_is_written_is_read"),
    (GuessesInApply, "test_two_stores_apply_the_same"),
    (GuessesInApply, "test_a_replay_gives_the_same_state"),
    (RefusesInApply, "test_apply_is_total"),
    (AppliesTheFirstSection, "test_sections_of_one_record_are_applied_in_order"),
    (ForgetsOnReplay, "test_a_replay_gives_the_same_state"),
    (SnapshotsAreLive, "test_a_snapshot_stays_as_it_is"),
    (QueriesOneShard, "test_queries_are_answered_everywhere"),
    (QueriesForEver, "test_a_query_ends_at_its_deadline"),
    (TakesAnyQuery, "test_queries_are_checked_before_they_run"),
    (LoadsHalf, "test_loads_are_worth_writes"),
    (LoadsAnyColumns, "test_columns_that_do_not_fit_are_refused"),
    (TakesAnyFile, "test_files_that_it_did_not_build_are_refused"),
]


def run(kind: AccountsKind, test: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "accounts", kind)

    class Tried(test_kinds.TestAccounts):
        sample = replace(test_kinds.TestAccounts.sample, kind=kind)

    act = getattr(Tried(), test)
    act(*([folder] if inspect.signature(act).parameters else []))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_mistake_is_noticed(
    mutant: type[AccountsKind], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        run(mutant(), test, tmp_path / "broken", monkeypatch)
    run(AccountsKind(), test, tmp_path / "sound", monkeypatch)  # the same, without the mistake
