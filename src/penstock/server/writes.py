"""Groups that a client sends: checked in full, then submitted in their order.

Thread: any.
Invariants: (1) nothing of a message is submitted before all of it was decoded and checked: what is malformed never
reaches the journal. (2) a plain group that is refused is the last that is looked at, so that none overtakes it.
"""

from __future__ import annotations

from typing import Any

from penstock.client import wire
from penstock.errors import Closed, CorruptionError, Invalid, NotFound, PenstockError
from penstock.journal.record import PartitionId
from penstock.kinds import Kind
from penstock.local import LocalPort
from penstock.partition.ledger import (
    LEDGER,
    Condition,
    TableInfo,
    Verdict,
    check_token,
    decode_condition,
)
from penstock.partition.pending import PendingGroup
from penstock.registry import conditions, kind_named, kind_of_condition
from penstock.server.rights import WRITE, Rights

ROW_BYTES = 64
HAPPENED = wire.Outcome(Verdict.DUPLICATE, happened=True)


class _Checked:
    """A group, decoded."""

    __slots__ = ("asked", "condition", "plain", "refusal", "sections", "size")

    def __init__(self, sent: wire.SentGroup) -> None:
        self.asked = Condition()
        self.condition = sent.condition
        self.plain = sent.plain
        self.sections: list[tuple[PartitionId, Any]] = []  # a section of a kind, or staged files
        self.size = 0
        self.refusal: PenstockError | None = None


class GroupTaker:
    """Takes groups of clients into the store."""

    def __init__(self, port: LocalPort) -> None:
        self._port = port

    def take(self, request: wire.Write, rights: Rights) -> wire.Outcomes:
        """Submit groups and wait until they are durable, applied and judged."""
        if len(request.groups) > wire.GROUPS_MAX:
            raise Invalid(f"a message has {len(request.groups)} groups: at most {wire.GROUPS_MAX} are taken")
        checked = [self._checked(sent, rights) for sent in request.groups]
        found: list[wire.Outcome | PendingGroup] = []
        last = 0
        for group in checked:
            try:
                pending = self._pending(group, again=request.again)
                if pending is not None:
                    last = self._port.submit(pending, group.size)
                found.append(HAPPENED if pending is None else pending)
            except Closed:
                raise  # of the store: the client goes to the next owner with all of it
            except PenstockError as error:
                if self._was_used(group):  # an earlier sending of it happened, and ended what it depended on
                    found.append(HAPPENED)
                    continue
                found.append(wire.Outcome(Verdict.REFUSED, wire.fault_of(error)))
                if group.plain:
                    break
        if last:
            self._port.wait_applied(last)
        return wire.Outcomes([self._outcome(group, one) for group, one in zip(checked, found, strict=False)])

    def _outcome(self, group: _Checked, found: wire.Outcome | PendingGroup) -> wire.Outcome:
        if isinstance(found, wire.Outcome):
            return found
        assert found.verdict is not None  # it was applied
        if found.verdict is Verdict.DUPLICATE and self._was_used(group):
            return HAPPENED  # otherwise a condition said so, and then no token was used
        return wire.Outcome(int(found.verdict))

    def _was_used(self, group: _Checked) -> bool:
        return group.asked.token is not None and self._port.was_used(group.asked.token)

    def _pending(self, group: _Checked, *, again: bool) -> PendingGroup | None:
        """A group for the coordinator; None if it is known to have happened."""
        if again and self._was_used(group):
            return None
        if group.refusal is not None:
            raise group.refusal
        pending = PendingGroup(group.condition)
        for partition, part in group.sections:
            if type(part) is list:  # exactly: a section of a kind may be a list of another sort
                pending.sections[partition] = self._port.accept(partition, part)
            else:
                pending.sections[partition] = (*pending.sections.get(partition, ()), part)
        return pending

    # -- checking

    def _checked(self, sent: wire.SentGroup, rights: Rights) -> _Checked:
        """A group, and why it is refused if it is malformed, not allowed, or for a table that is not there."""
        group = _Checked(sent)
        try:
            self._check(group, sent, rights)
        except (CorruptionError, UnicodeDecodeError) as error:
            group.refusal = Invalid(f"a condition does not decode: {error}")
        except PenstockError as error:
            group.refusal = error
        return group

    def _check(self, group: _Checked, sent: wire.SentGroup, rights: Rights) -> None:
        asked = decode_condition(sent.condition)
        if asked.token is not None:
            check_token(asked.token)
        group.asked = asked
        for name, argument in asked.others:
            self._check_condition(name, argument, rights)
        by_files = [section.partition for section in sent.sections if section.files is not None]
        if any(sum(section.partition == partition for section in sent.sections) > 1 for partition in by_files):
            raise Invalid("a group either writes to a shard or adopts files for it, all of them at once")
        for section in sent.sections:
            self._check_section(group, section, rights)

    def _check_condition(self, name: str, argument: bytes, rights: Rights) -> None:
        if name not in conditions():
            raise Invalid(f"there is no condition {name!r}")
        kind = kind_of_condition(name)
        info = self._table(int.from_bytes(argument[:8], "big"))
        if info is None:
            raise NotFound("the table of a condition was dropped")
        rights.check(WRITE, info.name)
        if info.kind != kind.name:
            raise Invalid(f"the condition {name} is not for table {info.name}")
        kind.check_condition(info, name, argument, own=False)

    def _check_section(self, group: _Checked, section: wire.SentSection, rights: Rights) -> None:
        partition = PartitionId(section.partition)
        if partition == LEDGER:
            raise Invalid("clients do not write to the ledger")
        info = self._table(partition >> 16)
        if info is None:
            raise NotFound(f"table {partition >> 16} was dropped")
        if partition & 0xFFFF >= info.shards:
            raise Invalid(f"table {info.name} has no shard {partition & 0xFFFF}")
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
