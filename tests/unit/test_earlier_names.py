"""Names of before that programs outside the tree use: they lead to what they always meant."""

from __future__ import annotations

from pathlib import Path

import penstock
import penstock.client
import penstock.store
from penstock.partition import ledger, ledger_records
from penstock.protocol import locator, wire
from penstock.queue.chain import QueueSettings
from penstock.registry import QUEUE


def test_modules() -> None:
    assert penstock.client.wire is wire
    assert penstock.client.place is locator
    assert penstock.store.StoreSettings is penstock.StoreSettings
    assert ledger.Condition is ledger_records.Condition
    assert ledger.encode_condition is ledger_records.encode_condition


def test_members(tmp_path: Path) -> None:
    small = QueueSettings(file_bytes=1 << 20)
    with penstock.store.open_store(str(tmp_path), settings=penstock.StoreSettings(queue=small)) as store:
        store.queue("events")
        assert store.settings.of_kind(QUEUE) == small
        info = store.port.table("events")
        assert info is not None
        assert info.table == info.table_id
        assert store.port.tend == store.port.maintain
        executor = store._coordinator._executor
        assert executor._applying is executor.applying is None
