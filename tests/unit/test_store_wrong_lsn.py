"""A journal that numbers a record otherwise than expected: nothing is acknowledged or applied until a new opening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from store_model import open_simulated

from penstock.errors import OutcomeUnknown, Poisoned
from penstock.journal.consensus import Alone
from penstock.journal.record import Lsn, decode, encode
from penstock.store.flusher import StoreFlusher
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk


def other_number(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another record come before the next one, as if two writers shared the journal."""
    propose = Alone.propose

    def behind_another(consensus: Alone, bodies: Sequence[bytes]) -> Lsn:
        monkeypatch.setattr(Alone, "propose", propose)
        record = decode(bodies[0], lsn=0)
        empty = type(record)(record.time_us, record.last_epoch, ())
        return consensus.propose([encode(empty), *bodies])

    monkeypatch.setattr(Alone, "propose", behind_another)


def written_after_recovery(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `recover` raises, after the record of a put got another number."""
    store = open_simulated(disk, FakeClock())
    table = store.kv("t")
    table.put(b"a", b"1", durable=True)
    other_number(store, monkeypatch)
    with pytest.raises(OutcomeUnknown, match="open the store again"):
        table.put(b"b", b"2", durable=True)
    try:
        store.recover()
    except Poisoned as error:
        return error
    finally:
        monkeypatch.undo()
    return store.statistics().applied_lsn, store._consensus.committed


def test_recovery_does_not_make_a_wrong_number_right(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    error = written_after_recovery(disk, monkeypatch)
    assert isinstance(error, Poisoned)
    assert "open the store again" in str(error)
    with open_simulated(disk.image().restore("restart"), FakeClock()) as store:
        assert dict(store.kv("t").scan()) == {b"a": b"1", b"b": b"2"}
        store.kv("t").put(b"c", b"3", durable=True)
        assert store.statistics().applied_lsn == store._consensus.committed


def test_one_that_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard the record is acknowledged under a number that is another's."""
    monkeypatch.setattr(StoreFlusher, "recover", lambda flusher: flusher._consensus.recover())
    lsns = written_after_recovery(SimulatedDisk(), monkeypatch)
    assert isinstance(lsns, tuple)
    assert lsns[0] < lsns[1]
