"""A draft reads as a transaction would, and ends in one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.host.clock import SystemClock
from penstock.manifest.draft import Draft
from penstock.manifest.settings import ManifestSettings
from penstock.testing import SimulatedDisk
from penstock.testing.manifest import MemoryEngine

keys = st.sampled_from([b"a", b"ab", b"b", b"c", b"\xff"])
steps = st.lists(st.tuples(keys, st.none() | st.binary(max_size=3)))


@given(before=steps, changes=steps, start=st.just(b"") | keys, stop=st.none() | keys)
def test_a_draft_is_what_the_transaction_will_be(
    before: list[tuple[bytes, bytes | None]],
    changes: list[tuple[bytes, bytes | None]],
    start: bytes,
    stop: bytes | None,
) -> None:
    engine = MemoryEngine("manifest", ManifestSettings(), SimulatedDisk(), SystemClock())
    model: dict[bytes, bytes] = {}
    with engine.write() as view:
        for key, value in before:
            if value is not None:
                view.put("db", key, value)
                model[key] = value
    with engine.write() as view:
        draft = Draft(view)
        for key, value in changes:
            if value is None:
                assert draft.delete("db", key) == (model.pop(key, None) is not None)
            else:
                draft.put("db", key, value)
                model[key] = value
            assert draft.get("db", key) == model.get(key)
        expected = [(key, model[key]) for key in sorted(model) if start <= key and (stop is None or key < stop)]
        assert list(draft.scan("db", start, stop)) == expected
        draft.write_to(view)
    with engine.read() as read:
        assert dict(read.scan("db")) == model
