"""What a store must hold after what was done to it.

Each key has the values it may have: one if everything about it is known, more where an outcome is unknown. An operation
that leaves something unique (see `history`) shows by itself whether it happened, so that all else it did is certain.

The model is fed with the histories of a round and a dump of the store after it; then it says what is wrong, and takes
what it saw for the truth from then on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from faults.history import (
    EPHEMERAL,
    Dump,
    Effect,
    Event,
    Message,
    Operation,
    Outcome,
    Reopened,
    Saw,
    Violation,
    Word,
)
from faults.moment import find_tears, number_of

CLOCK_S = 0.05  # by which expiries may be off, between the clocks of two looks
HAPPENED: frozenset[Word] = frozenset({"done", "duplicate"})


@dataclass(frozen=True)
class Value:
    """What a key may be: a text or absent, and from when to when it may expire."""

    text: str | None
    low_s: float = inf
    high_s: float = inf

    def fits(self, text: str | None, begun_s: float, ended_s: float) -> bool:
        """Whether it is what a look between these times saw."""
        if text is None:
            return self.text is None or ended_s > self.low_s - CLOCK_S
        return text == self.text and begun_s < self.high_s + CLOCK_S


ABSENT = Value(None)
Values = tuple[Value, ...]


@dataclass
class Attempt:
    """An operation and what is known of it."""

    operation: Operation
    outcome: Outcome | None = None  # None: its process was killed first
    epoch: int = 0  # of the actor: openings of its store before it
    is_durable: bool = False  # a later flush made it durable
    happened: bool | None = None  # None: nobody knows

    @property
    def word(self) -> Word:
        if self.is_durable:
            return "done"
        return "unknown" if self.outcome is None else self.outcome.word

    @property
    def name(self) -> str:
        error = "" if self.outcome is None or not self.outcome.error else f", {self.outcome.error}"
        return f"{self.operation.actor}.{self.operation.number} {self.operation.kind} ({self.word}{error})"


@dataclass
class ScratchTable:
    """A table that is dropped and made again. Rows have the birth of their table, as its writer saw it."""

    births: set[int | None] = field(default_factory=lambda: {None})  # it may be of these; None: not there
    rows: dict[str, tuple[int, bool]] = field(default_factory=dict)  # by key: birth, and whether it must be there
    may_drop: bool = False  # the outcome of the last drop is unknown, and nothing was written to the table since


class Model:
    """A store as it must be."""

    def __init__(self, tables: Iterable[str], queues: Iterable[str], scratch: Iterable[str]) -> None:
        self._tables: dict[str, dict[str, Values]] = {name: {} for name in tables}
        self._queues: dict[str, list[Message]] = {name: [] for name in queues}
        self._scratch = {name: ScratchTable() for name in scratch}
        self._acknowledged: set[tuple[int, int]] = set()  # by the consumer that acknowledges on its own
        self._maybe_acknowledged: set[tuple[int, int]] = set()
        self.tokens: dict[str, dict[int, Operation]] = defaultdict(dict)  # by actor: all that were ever used
        self.happened: dict[str, set[int]] = defaultdict(set)  # of these, those whose outcome is certain

    def check(self, histories: list[list[Event]], dump: Dump) -> list[str]:
        """All that is wrong with a store after a round."""
        wrong = [f"{event.actor}: {event.text}" for events in histories for event in events if type(event) is Violation]
        attempts = [attempt for events in histories for attempt in _attempts(events)]
        identities = {name: Counter(_identity(m.payload) for m in messages) for name, messages in dump.queues.items()}
        sent = {_token(attempt) for attempt in attempts if attempt.word != "refused"}
        for attempt in attempts:
            wrong += self._resolve(attempt, dump, identities, sent)
        self._merge_tokens(attempts)
        wrong += _out_of_order(attempts)
        for attempt in attempts:
            self._replay(attempt)
        wrong += self._check_tables(dump)
        wrong += self._check_queues(attempts, dump, identities)
        wrong += self._check_consumers(dump)
        wrong += self._check_scratch(dump)
        wrong += find_tears(
            {name: dump.tables.get(name, {}) for name in self._tables},
            {name: frozenset(identities.get(name, ())) for name in self._queues},
        )
        wrong += _unseen(histories, dump)
        return wrong

    # -- what happened

    def _resolve(
        self, attempt: Attempt, dump: Dump, identities: dict[str, Counter[str]], sent: set[tuple[str, int | None]]
    ) -> Iterator[str]:
        """Find out whether an operation happened, by what it left; `sent`: tokens that were not always refused."""
        operation = attempt.operation
        unique = [effect for effect in operation.effects if effect.unique]
        present = [_is_there(effect, dump, identities) for effect in unique]
        if unique and any(present) != all(present):
            missing = [effect for effect, there in zip(unique, present, strict=True) if not there]
            yield f"torn: {attempt.name} left {sum(present)} of {len(unique)}, not {missing[0]}"
        if unique:
            attempt.happened = any(present)
            if attempt.word in HAPPENED and not attempt.happened:
                yield f"lost: {attempt.name}"
            again = operation.token is not None and (
                operation.token in self.tokens[operation.actor] or _token(attempt) in sent
            )
            if attempt.word == "refused" and attempt.happened and not again:
                yield f"refused, and there: {attempt.name}"
        else:
            attempt.happened = {"done": True, "duplicate": True, "refused": False}.get(attempt.word)
        if attempt.word == "done" and operation.token in self.happened[operation.actor]:
            yield f"a token that was used was taken again: {attempt.name}"

    def _merge_tokens(self, attempts: list[Attempt]) -> None:
        """An operation that was sent again is one operation: its effects count for the first attempt alone."""
        for attempt in attempts:
            operation = attempt.operation
            if operation.token is None:
                continue
            if operation.token in self.tokens[operation.actor] and operation.token in self.happened[operation.actor]:
                attempt.happened = False  # what it did was counted before
            self.tokens[operation.actor][operation.token] = operation
            if attempt.happened:
                self.happened[operation.actor].add(operation.token)

    def _replay(self, attempt: Attempt) -> None:
        operation = attempt.operation
        for effect in operation.effects:
            if effect.table in self._tables and attempt.happened is not False:
                self._apply(effect, attempt)
        if operation.kind == "ack":
            self._maybe_acknowledged.update(operation.messages)
            if attempt.happened:
                self._acknowledged.update(operation.messages)
        if operation.table in self._scratch:
            _replay_scratch(self._scratch[operation.table], attempt)

    def _apply(self, effect: Effect, attempt: Attempt) -> None:
        rows = self._tables[effect.table]
        keys = [key for key in rows if effect.key <= key < effect.value] if effect.kind == "range" else [effect.key]
        for key in keys:
            before = rows.get(key, (ABSENT,))
            after = tuple(dict.fromkeys(_changed(value, effect, attempt) for value in before))
            rows[key] = after if attempt.happened else tuple(dict.fromkeys((*before, *after)))

    # -- what is there

    def _check_tables(self, dump: Dump) -> Iterator[str]:
        for name, rows in self._tables.items():
            actual = dump.tables.get(name)
            if actual is None:
                if rows:
                    yield f"lost: table {name}"
                continue
            for key in sorted(rows.keys() | actual.keys()):
                expected, text = rows.get(key, (ABSENT,)), actual.get(key)
                fitting = tuple(value for value in expected if value.fits(text, dump.begun_s, dump.ended_s))
                if not fitting and key[0] == EPHEMERAL:
                    fitting = _ephemeral(expected, text, dump)
                if not fitting:
                    yield f"wrong value: table {name}, {key} is {_show(text)}, not {_show_all(expected)}"
                    fitting = (Value(text),)
                rows[key] = fitting
                if fitting == (ABSENT,):
                    del rows[key]

    def _check_queues(self, attempts: list[Attempt], dump: Dump, identities: dict[str, Counter[str]]) -> Iterator[str]:
        for name, before in self._queues.items():
            now = dump.queues.get(name, [])
            payloads = {(message.shard, message.sequence): message.payload for message in now}
            for message in before:
                message_position = message.shard, message.sequence
                if payloads.get(message_position) != message.payload:
                    was, now_is = _show(message.payload), _show(payloads.get(message_position))
                    yield f"a message changed: {name} {message_position} was {was}, is {now_is}"
            for identity, count in identities.get(name, Counter[str]()).items():
                if count > 1:
                    yield f"doubled: message {identity} is {count} times in {name}"
            yield from _gaps(name, now)
            yield from _strangers(name, now, before, attempts)
            self._queues[name] = now
        for attempt in attempts:
            position = None if attempt.outcome is None else attempt.outcome.position
            if position is not None and (actual := _position_of(attempt, dump)) != position:
                yield f"moved: {attempt.name} was told {position}, and is at {actual}"

    def _check_consumers(self, dump: Dump) -> Iterator[str]:
        everything = {(message.shard, message.sequence) for message in dump.queues.get("q", [])}
        works = {_work_position(key) for key in dump.tables.get("a", {}) if key.startswith("d/")}
        if "worker" in dump.delivered:
            delivered = set(dump.delivered["worker"])
            for position in sorted(delivered & works):
                yield f"worked off and delivered again: message {position}"
            for position in sorted(everything - delivered - works):
                yield f"acknowledged without its result: message {position}"
        if "taker" in dump.delivered:
            delivered = set(dump.delivered["taker"])
            for position in sorted(delivered & self._acknowledged):
                yield f"acknowledged and delivered again: message {position}"
            for position in sorted(everything - delivered - self._maybe_acknowledged):
                yield f"never delivered: message {position}"
            self._acknowledged = self._maybe_acknowledged = everything - delivered
            self._maybe_acknowledged = set(self._acknowledged)

    def _check_scratch(self, dump: Dump) -> Iterator[str]:
        for name, table in self._scratch.items():
            rows = _scratch_rows(name, dump)
            if rows is None:
                if None not in table.births:
                    yield f"lost: table {name}"
                self._scratch[name] = ScratchTable()
                continue
            living = {birth for birth in table.births if birth is not None}
            if not living:
                yield f"table {name} was dropped, and is there"
            for key, birth in rows.items():
                if living and birth < min(living):
                    yield f"row {key} of table {name} is back: it was dropped with {birth}"
                if key not in table.rows:
                    yield f"row {key} of table {name} was never written, or was refused"
            for key, (birth, certain) in table.rows.items():
                if certain and key not in rows:
                    yield f"lost: row {key} of table {name} ({birth})"
            table.births = {min(living)} if living else {0}
            table.rows = {key: (birth, True) for key, birth in rows.items()}


# -- histories


def _attempts(events: list[Event]) -> list[Attempt]:
    attempts: dict[tuple[str, int], Attempt] = {}
    epochs: Counter[str] = Counter()
    written: dict[str, list[Attempt]] = defaultdict(list)
    for event in events:
        if isinstance(event, Operation):
            attempts[event.actor, event.number] = Attempt(event, epoch=epochs[event.actor])
        elif isinstance(event, Outcome):
            attempt = attempts[event.actor, event.number]
            attempt.outcome = event
            if attempt.operation.client and event.word in ("refused", "unknown"):
                written.pop(event.actor, None)  # it may speak of those: a client is told late, and once
            if event.word == "written":
                written[event.actor].append(attempt)
            elif attempt.operation.kind == "flush":
                for one in written.pop(event.actor, []):
                    one.is_durable = event.word == "done"
        elif isinstance(event, Reopened):
            epochs[event.actor] += 1
            written.pop(event.actor, None)
    return list(attempts.values())


def _token(attempt: Attempt) -> tuple[str, int | None]:
    return attempt.operation.actor, attempt.operation.token


def _out_of_order(attempts: list[Attempt]) -> Iterator[str]:
    """Plain writes of one actor happen in their order: none is missing before one that happened."""
    # A client is told of refusals late, so that a refused write of its stream may still count as written.
    told_late = {
        (attempt.operation.actor, attempt.epoch)
        for attempt in attempts
        if attempt.operation.client and attempt.word == "refused"
    }
    missing: dict[tuple[str, int], Attempt] = {}
    for attempt in attempts:
        operation, name = attempt.operation, (attempt.operation.actor, attempt.epoch)
        if (
            name in told_late
            or operation.conditional
            or operation.token is not None
            or not any(e.unique for e in operation.effects)
        ):
            continue
        # An error of the system, or of finding an owner, may have come before anything was written.
        error = "" if attempt.outcome is None else attempt.outcome.error
        is_accepted = attempt.word == "written" or (error.startswith("OutcomeUnknown") and not operation.client)
        if is_accepted and not attempt.happened:
            missing.setdefault(name, attempt)
        elif attempt.happened and name in missing:
            yield f"out of order: {missing.pop(name).name} is missing before {attempt.name}"


def _unseen(histories: list[list[Event]], dump: Dump) -> Iterator[str]:
    for events in histories:
        for event in events:
            if isinstance(event, Saw):
                for key in event.keys:
                    if key not in dump.tables.get(event.table, {}):
                        yield f"{event.actor} saw {key} of table {event.table}, and it is gone"


def _is_there(effect: Effect, dump: Dump, identities: dict[str, Counter[str]]) -> bool:
    if effect.kind == "message":
        return _identity(effect.value) in identities.get(effect.table, ())
    return dump.tables.get(effect.table, {}).get(effect.key) == effect.value


def _identity(payload: str) -> str:
    return payload.partition("|")[0]


# -- values


def _changed(value: Value, effect: Effect, attempt: Attempt) -> Value:
    if effect.kind in ("delete", "range"):
        return ABSENT
    ended_s = attempt.outcome.ended_s if attempt.outcome is not None else inf
    if effect.kind == "add" and effect.ttl_s:
        return Value("?", 0.0, ended_s + effect.ttl_s)  # see _ephemeral
    if effect.kind == "add":
        total = number_of(value.text) + effect.amount
        return Value(total.to_bytes(8, "little", signed=True).decode("latin-1"))
    if not effect.ttl_s:
        return Value(effect.value)
    return Value(effect.value, attempt.operation.begun_s + effect.ttl_s, ended_s + effect.ttl_s)


def _ephemeral(expected: Values, text: str | None, dump: Dump) -> Values:
    """Merges that expire: while one may live, any sum is right."""
    last_s = max(value.high_s for value in expected)
    return (Value(text, 0.0, last_s),) if dump.begun_s < last_s + CLOCK_S else ()


def _show(text: str | None) -> str:
    return "absent" if text is None else repr(text if len(text) < 40 else f"{text[:37]}...")


def _show_all(values: Values) -> str:
    return " or ".join(_show(value.text) for value in values)


# -- queues


def _gaps(name: str, messages: list[Message]) -> Iterator[str]:
    last: dict[int, int] = {}
    for message in messages:
        if message.sequence != last.get(message.shard, 0) + 1:
            yield f"gap: {name} {message.shard}/{message.sequence} follows {last.get(message.shard, 0)}"
        last[message.shard] = message.sequence


def _strangers(name: str, now: list[Message], before: list[Message], attempts: list[Attempt]) -> Iterator[str]:
    """Messages that nobody put, and plain ones of an actor that are not in its order."""
    old = {_identity(message.payload) for message in before}
    put = {
        _identity(effect.value): attempt.operation
        for attempt in attempts
        for effect in attempt.operation.effects
        if effect.kind == "message" and effect.table == name
    }
    last: dict[tuple[int, str], int] = {}
    for message in now:
        identity = _identity(message.payload)
        if identity in old:
            continue
        if identity not in put:
            yield f"message {_show(message.payload)} is in {name}, and nobody put it"
            continue
        operation = put[identity]
        if operation.token is not None or operation.conditional:
            continue
        key = message.shard, operation.actor
        if operation.number < last.get(key, 0):
            yield f"message {identity} of {name} stands behind {last[key]} of the same actor"
        last[key] = operation.number


def _position_of(attempt: Attempt, dump: Dump) -> tuple[int, int] | None:
    effect = attempt.operation.effects[0]
    for message in dump.queues.get(effect.table, []):
        if _identity(message.payload) == _identity(effect.value):
            return message.shard, message.sequence
    return None


def _work_position(key: str) -> tuple[int, int]:
    _, shard, sequence = key.split("/")
    return int(shard), int(sequence)


# -- tables that come and go


def _replay_scratch(table: ScratchTable, attempt: Attempt) -> None:
    operation, happened = attempt.operation, attempt.happened
    if operation.kind == "drop" and happened is not False:
        table.may_drop = not happened
        table.births = {None} if happened else table.births | {None}
        table.rows = {} if happened else {key: (birth, False) for key, (birth, _) in table.rows.items()}
    elif operation.kind == "create" and happened is not False:
        births: set[int | None] = {operation.birth if birth is None else birth for birth in table.births}
        # "There" is an answer, not a write: a drop of unknown outcome may still come behind it.
        table.births = births if happened and not table.may_drop else table.births | births
    elif operation.kind == "fill" and happened is not False:
        if happened:  # behind every write before it, the drop too: that one came before the table was made, or never
            table.births, table.may_drop = table.births - {None} or {operation.birth}, False
        for effect in operation.effects:
            table.rows[effect.key] = (operation.birth, happened is True)


def _scratch_rows(name: str, dump: Dump) -> dict[str, int] | None:
    if name in dump.tables:
        return {key: int(value) for key, value in dump.tables[name].items()}
    if name in dump.queues:
        return {
            message.payload.partition(" ")[0]: int(message.payload.partition(" ")[2]) for message in dump.queues[name]
        }
    return None
