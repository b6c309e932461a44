"""Accepts groups from clients: checks all of them, then submits them in order.

A client learns one of three outcomes for each group:
    done       it is durable, applied and judged: an outcome with a verdict
    not done   an outcome with a fault: this sending was not submitted, and no earlier one happened or ever will
    unknown    an error instead of outcomes (`OutcomeUnknown`, `WaitExpired`, or the owner yields): the client sends the
               whole message again with the same tokens, to this owner or the next

Thread: any.
Invariants: (1) a whole message is decoded and checked before any of it is submitted: malformed data never reaches the
journal. (2) processing stops at a plain group that is refused, so that none overtakes it. (3) a fault is answered only
after everything submitted before is applied, and while no other request works on a group with the same token: then the
ledger knows whether an earlier sending happened. (4) a client that may write to no table changes nothing, not even with
an empty group; its tokens are its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.errors import Closed, CorruptionError, Invalid, NotFound, OutcomeUnknown, PenstockError, Poisoned
from penstock.feeds import check_condition
from penstock.host import threads
from penstock.journal.partitions import PartitionId, shard_number, table_of
from penstock.kinds import Kind
from penstock.partition.ledger_records import LEDGER, Condition, TableInfo, Verdict, decode_condition, encode_condition
from penstock.partition.pending import PendingGroup
from penstock.partition.tokens import check_token
from penstock.protocol import wire
from penstock.registry import find_condition, kind_named
from penstock.server.rights import WRITE, Rights
from penstock.server.work import Work
from penstock.store.port import LocalPort

ROW_BYTES = 64
ADMIT_S = 0.5  # for a shard that takes no writes now: the client waits, with growing pauses, and tries again
CONDITION_WEIGHT = 24  # bytes of memory for each byte sent, at most
HAPPENED = wire.Outcome(Verdict.DUPLICATE, happened=True)


class _Checked:
    """A decoded and checked group."""

    __slots__ = ("condition", "decoded", "plain", "refusal", "sections", "size")

    def __init__(self, sent: wire.SentGroup) -> None:
        self.decoded = Condition()
        self.condition = sent.condition
        self.plain = sent.plain
        self.sections: list[tuple[PartitionId, Any]] = []  # a section of a kind, or staged files
        self.size = 0
        self.refusal: PenstockError | None = None


class GroupTaker:
    """Submits the groups of clients to the store."""

    def __init__(self, port: LocalPort, fault: Callable[[PenstockError, Rights], wire.ErrorMessage]) -> None:
        self._port = port
        self._fault = fault  # encodes an error for a client
        self._lock = threads.lock("server.writes")
        self._at_work: Counter[tuple[str, int]] = Counter()  # guarded by _lock; tokens

    def take(self, request: wire.ReceivedWrite, work: Work) -> wire.Outcomes:
        """Submit groups and wait until they are durable, applied and judged."""
        groups, rights = wire.groups_of(request), work.rights
        work.hold(sum(map(self._weight, groups)))
        checked = [self._checked(sent, rights) for sent in groups]
        tokens = {group.decoded.token for group in checked if group.decoded.token is not None}
        with self._lock:
            self._at_work.update(tokens)
        try:
            return self._take(checked, rights, again=request.again)
        except Poisoned as error:  # the batch is written again when the owner recovers
            raise OutcomeUnknown(f"the owner's writes failed, and it has not recovered yet: {error}") from error
        finally:
            with self._lock:
                self._at_work -= Counter(tokens)

    def _take(self, checked: list[_Checked], rights: Rights, *, again: bool) -> wire.Outcomes:
        outcomes: list[PenstockError | PendingGroup | None] = []  # None: an earlier sending happened
        last = 0
        for group in checked:
            try:
                pending = self._pending(group, again=again)
                if pending is not None:
                    last = self._port.submit(pending, group.size, ADMIT_S)
                outcomes.append(pending)
            except (Closed, Poisoned):
                raise  # of the store: the client sends the whole message again
            except PenstockError as error:
                outcomes.append(error)
                if group.plain and not self._was_used(group):
                    break
        if last:
            self._port.wait_applied(last)
        for outcome in outcomes:
            if isinstance(outcome, PendingGroup):
                self._port.free_refused(outcome)
        if any(isinstance(outcome, PenstockError) for outcome in outcomes):
            self._end_earlier_sendings(checked)
        pairs = zip(checked, outcomes, strict=False)
        return wire.Outcomes([self._outcome(group, outcome, rights) for group, outcome in pairs])

    def _end_earlier_sendings(self, checked: list[_Checked]) -> None:
        """Wait until no earlier sending of a group can happen any more; `OutcomeUnknown` if one is still running."""
        with self._lock:
            if any(self._at_work[group.decoded.token] > 1 for group in checked if group.decoded.token is not None):
                raise OutcomeUnknown("an earlier sending of this group is still running: send it again")
        self._port.flush(None)

    def _outcome(self, group: _Checked, outcome: PenstockError | PendingGroup | None, rights: Rights) -> wire.Outcome:
        if outcome is None:
            return HAPPENED
        if isinstance(outcome, PenstockError):  # perhaps because an earlier sending happened
            return HAPPENED if self._was_used(group) else wire.Outcome(Verdict.REFUSED, self._fault(outcome, rights))
        if outcome.verdict is None:
            raise OutcomeUnknown("the owner does not know the outcome of this group: send it again")
        if outcome.verdict is Verdict.DUPLICATE and self._was_used(group):
            return HAPPENED  # otherwise a condition reported it, and no token was used
        return wire.Outcome(int(outcome.verdict), refused_by=outcome.refused_by)

    def _was_used(self, group: _Checked) -> bool:
        return group.decoded.token is not None and self._port.is_token_used(group.decoded.token)

    def _pending(self, group: _Checked, *, again: bool) -> PendingGroup | None:
        """Return a group for the coordinator; None if an earlier sending happened."""
        if again and self._was_used(group):
            return None
        if group.refusal is not None:
            raise group.refusal
        pending = PendingGroup(group.condition)
        for partition, part in group.sections:
            if type(part) is list:  # exactly: a kind's section may be a subclass of list
                self._port.accept(pending, partition, part)
            else:
                pending.sections[partition] = (*pending.sections.get(partition, ()), part)
        return pending

    # -- checking

    def _weight(self, sent: wire.SentGroup) -> int:
        """Estimate the memory of a group when it is decoded."""
        weight = CONDITION_WEIGHT * len(sent.condition)
        for section in sent.sections:
            info = self._table(table_of(section.partition))
            if section.files is None and info is not None:
                weight += kind_named(info.kind, info.name).weight(section.payload)
        return weight

    def _checked(self, sent: wire.SentGroup, rights: Rights) -> _Checked:
        """Decode and check a group; `refusal` is set if it is malformed, not allowed, or its table does not exist."""
        group = _Checked(sent)
        try:
            self._check(group, sent, rights)
        except (CorruptionError, UnicodeDecodeError) as error:
            group.refusal = Invalid(f"a condition does not decode: {error}")
        except PenstockError as error:
            group.refusal = error
        return group

    def _check(self, group: _Checked, sent: wire.SentGroup, rights: Rights) -> None:
        decoded = decode_condition(sent.condition)
        if not sent.sections and not decoded.others:
            rights.check_anywhere(WRITE)  # no table to check the rights of
        if decoded.token is not None:
            decoded = Condition(rights.own_token(check_token(decoded.token)), decoded.others)
            group.condition = encode_condition(decoded)
        group.decoded = decoded
        for name, argument in decoded.others:
            self._check_condition(name, argument, rights)
        by_files = [section.partition for section in sent.sections if section.files is not None]
        if any(sum(section.partition == partition for section in sent.sections) > 1 for partition in by_files):
            raise Invalid("a group either writes to a shard or adopts files for it, all of them at once")
        for section in sent.sections:
            self._check_section(group, section, rights)

    def _check_condition(self, name: str, argument: bytes, rights: Rights) -> None:
        if find_condition(name) is None:
            raise Invalid(f"there is no condition {name!r}")
        info = self._table(int.from_bytes(argument[:8], "big"))
        if info is None:
            raise self._dropped(int.from_bytes(argument[:8], "big"), rights)
        rights.check(WRITE, info.name)
        check_condition(info, name, argument, own=False)

    def _check_section(self, group: _Checked, section: wire.SentSection, rights: Rights) -> None:
        partition = PartitionId(section.partition)
        if partition == LEDGER:
            raise Invalid("clients do not write to the ledger")
        info = self._table(table_of(partition))
        if info is None:
            raise self._dropped(table_of(partition), rights)
        if shard_number(partition) >= info.shards:
            raise Invalid(f"table {info.name} has no shard {shard_number(partition)}")
        rights.check(WRITE, info.name)
        kind: Kind = kind_named(info.kind, info.name)
        if section.files is not None:
            group.sections.append((partition, section.files))
        else:
            part = kind.receive(section.payload, info.options)
            group.sections.append((partition, part))
            group.size += len(section.payload) + ROW_BYTES * len(part)

    def _table(self, table: int) -> TableInfo | None:
        return self._port.table_by_id(table)

    def _dropped(self, table: int, rights: Rights) -> NotFound:
        return rights.dropped_table(table, self._port.dropped_name(table))
