from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.log.chain import Chain, SegmentName, read_names


def live_by_the_rule(names: set[SegmentName]) -> list[SegmentName]:
    """The rule word by word: a segment is dead if one of a later incarnation, or of its own, stands at or below it."""
    order = sorted(names, key=lambda n: (n.incarnation, n.first))
    return [n for i, n in enumerate(order) if all(later.first > n.first for later in order[i + 1 :])]


segment_names = st.sets(st.builds(SegmentName, st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(segment_names)
def test_names_decide(names: set[SegmentName]) -> None:
    chain, dead, highest, strangers = read_names([str(name) for name in names])
    assert strangers == []
    assert list(chain) == live_by_the_rule(names)
    assert dead == names - set(chain)
    assert highest == max((n.incarnation for n in names), default=0)
    assert list(chain.firsts) == sorted(chain.firsts)


@given(segment_names, st.integers(0, 31))
def test_adding_a_segment_is_the_same_as_reading_it(names: set[SegmentName], first: int) -> None:
    chain, _, highest, _ = read_names([str(name) for name in names])
    name = SegmentName(first, highest + 1)
    assert list(chain.with_segment(name)) == list(read_names([str(n) for n in {*names, name}])[0])


@given(segment_names, st.integers(-1, 40))
def test_place_of(names: set[SegmentName], index: int) -> None:
    chain, _, _, _ = read_names([str(name) for name in names])
    position = chain.position_of(index)
    assert position == max((i for i, n in enumerate(chain) if n.first <= index), default=-1)


def test_other_files_are_told_apart() -> None:
    segment = "00000000000000000007-0000000003.log"
    others = ["x", "", segment + ".tmp", segment.replace("-", "_"), "0000000000000000000x-0000000003.log", "ü" * 35]
    others.append("18446744073709551616-0000000003.log")
    chain, dead, highest, strangers = read_names([segment, *others])
    assert list(chain) == [SegmentName(7, 3)]
    assert (dead, highest, sorted(strangers)) == (set(), 3, sorted(others))


def test_numbers_of_every_size() -> None:
    name = SegmentName(2**63, 2**32 - 1)
    assert list(read_names([str(name)])[0]) == [name]
    assert list(Chain([], [])) == []
