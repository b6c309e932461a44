"""What a vector shard promises across crashes, as a scenario.

The history holds every record (`write`), the internal ids it gave, and what was told to be stored. A resumed shard,
after the records above its `stored` are applied again, must have the same internal ids and the same nearest vectors;
*before* that, whatever files it has must hold together: no vector without its id, no id without its vector, no deleted
vector in a list unless it is known as deleted, no internal id at or above the sequence.
"""

from __future__ import annotations

from shard_scenario import ShardScenario
from vector_under_test import Records, VectorModel, VectorUnderTest, check_nearest, contents, deletes, nearest, upserts

from penstock.errors import CorruptionError, PenstockError
from penstock.testing import History, SimulatedDisk, Violation
from penstock.vector.keys import DELETED, DICTIONARY, RECORD, VECTOR
from penstock.vector.operators import decode_ids
from penstock.vector.section import Part, VectorSection, decode_section
from penstock.vector.stored import internal_id, read_generations, read_postings, read_sequence, split_record

QUERY = [1.0, 2.0, 3.0]


def rows(number: int) -> Records:
    """Old and new ids: each record replaces one of the record before."""
    return {
        f"id{(number + shift) % 7}": ((float(number), float(shift), 1.0), {"n": number, "s": "x"} if shift else {})
        for shift in range(3)
    }


def record(number: int) -> list[Part]:
    """The parts of a record: upserts, now and then deletes, also of what it just wrote."""
    parts: list[Part] = [upserts(rows(number))]
    if number % 3 == 0:
        parts.append(deletes(f"id{number % 7}", f"id{(number + 4) % 7}", "nobody"))
    return parts


class VectorScenario(ShardScenario[VectorUnderTest]):
    """Upserts, deletes and the steps of new generations of centroids."""

    records = 8
    flush_every = 2
    compact_every = 4
    indexed_from = 3  # from this record on, a step of a generation follows each

    def make(self, disk: SimulatedDisk) -> VectorUnderTest:
        return VectorUnderTest(disk, grace_s=0)

    def write(self, shard: VectorUnderTest, history: History, number: int) -> None:
        self._append(shard, history, record(number))
        if number >= self.indexed_from:
            self._append(shard, history, [shard.step()])

    def _append(self, shard: VectorUnderTest, history: History, parts: list[Part]) -> None:
        lsn = 1 + shard.tree.lsn
        history.note("write", lsn, parts)
        shard.write(*parts)
        history.note("ids", lsn, ids_of(shard))

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        shard = self.reopen(disk, history)
        try:
            whole(shard)
            ids_by_lsn = {values[0]: values[1] for word, *values in history.events if word == "ids"}
            stored = shard.tree.stored
            for word, *values in list(history.events):
                if word == "write":
                    for part in values[1]:
                        self.reached[f"{type(part).__name__} {'stored' if values[0] <= stored else 'replayed'}"] += 1
                if word == "write" and values[0] > stored:
                    shard.apply(values[0], shard.clock.time_us(), VectorSection(*values[1]))
                    if ids_by_lsn.get(values[0], ids_of(shard)) != ids_of(shard):
                        raise Violation(f"the replay of record {values[0]} gave other internal ids")
                    history.note("ids", values[0], ids_of(shard))
            self.check(shard, history)
            self._append(shard, history, record(1 + shard.tree.lsn))
            self.store(shard, history)
            self.compact(shard, history)
            self.collect(shard, history)
            self.check(shard, history)
            whole(shard)
        finally:
            shard.close()

    def check(self, shard: VectorUnderTest, history: History) -> None:
        model = VectorModel()
        for word, *values in history.events:
            if word == "write":
                for part in VectorSection(*values[1]).parts:
                    model.add(part)
        state = shard.machine.snapshot()
        try:
            records = contents(state)
            if records != model.records or state.count != len(records):
                wrong = {k for k in {*records, *model.records} if records.get(k) != model.records.get(k)}
                raise Violation(f"the shard holds otherwise than it was told: {sorted(wrong)[:5]}")
            check_nearest(nearest(state, QUERY, 4), model.distances(QUERY), 4)
        except (PenstockError, AssertionError) as error:
            if isinstance(error, CorruptionError) and shard.disk.damaged:
                raise  # the right answer to bit rot
            raise Violation(str(error)) from error
        finally:
            state.close()


def ids_of(shard: VectorUnderTest) -> tuple[int, tuple[tuple[bytes, int], ...]]:
    """The next internal id, and the internal id of each external one."""
    pairs = tuple((key[1:], internal_id(value)) for key, value in shard.tree.scan(prefix=DICTIONARY))
    return read_sequence(shard.tree.view).next, pairs


def whole(shard: VectorUnderTest) -> None:
    """Raise `Violation` if the stored rows do not belong together."""
    view = shard.tree.view
    ids = {internal_id(value): key[1:] for key, value in shard.tree.scan(prefix=DICTIONARY)}
    vectors = {int.from_bytes(key[1:], "big") for key, _ in shard.tree.scan(prefix=VECTOR)}
    records = {int.from_bytes(key[1:], "big"): split_record(value)[0] for key, value in shard.tree.scan(prefix=RECORD)}
    if not (vectors == set(ids) == set(records)) or records != ids:
        raise Violation(f"ids {sorted(ids)}, vectors {sorted(vectors)} and records {sorted(records)} differ")
    sequence, deleted = read_sequence(view), set(decode_ids(view.get(DELETED)))
    if sequence.count != len(ids) or any(number >= sequence.next for number in ids):
        raise Violation(f"the sequence {sequence} does not fit {len(ids)} vectors up to {max(ids, default=0)}")
    for generation in read_generations(view).live():
        listed = {number for _, members in read_postings(view, generation) for number in members}
        if listed - vectors - deleted:
            raise Violation(f"lists hold {sorted(listed - vectors - deleted)}, which are neither there nor deleted")
    current = read_generations(view).current
    if current:
        listed = {number for _, members in read_postings(view, current) for number in members}
        if vectors - listed:
            raise Violation(f"no list holds {sorted(vectors - listed)}")


def replayed(payloads: list[bytes]) -> VectorUnderTest:
    """A shard to which sections were applied."""
    shard = VectorUnderTest()
    for lsn, payload in enumerate(payloads, start=1):
        shard.apply(lsn, shard.clock.time_us(), decode_section(payload))
    return shard
