"""Line protocol: what becomes a sample, and what is refused with the number of its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.http.line_protocol import decode_lines

NOW = 1_700_000_000_000_000


def rows(text: str, precision: str = "ns") -> list[tuple[dict[str, str], int, float]]:
    columns = decode_lines(text.encode(), NOW, precision)
    return [
        (dict(columns.series[series]), moment, value)
        for series, moment, value in zip(
            columns.index.tolist(), columns.times_us.tolist(), columns.values.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu value=1", [({"__name__": "cpu"}, NOW, 1.0)]),
        ("cpu,host=a idle=0.5 5000", [({"__name__": "cpu_idle", "host": "a"}, 5, 0.5)]),
        (
            "cpu,host=a,dc=x idle=1e3,user=-2i,n=7u,on=t,off=FALSE 1700000000000000000",
            [
                ({"__name__": "cpu_idle", "host": "a", "dc": "x"}, NOW, 1000.0),
                ({"__name__": "cpu_user", "host": "a", "dc": "x"}, NOW, -2.0),
                ({"__name__": "cpu_n", "host": "a", "dc": "x"}, NOW, 7.0),
                ({"__name__": "cpu_on", "host": "a", "dc": "x"}, NOW, 1.0),
                ({"__name__": "cpu_off", "host": "a", "dc": "x"}, NOW, 0.0),
            ],
        ),
        (r"my\ cpu,h\,o=a\=b v=1", [({"__name__": "my cpu_v", "h,o": "a=b"}, NOW, 1.0)]),
        ('a text="x, y=1 \\" \n z",value=2', [({"__name__": "a"}, NOW, 2.0)]),
        ("# a comment\n\n  \na value=1 \r\nb value=2", [({"__name__": "a"}, NOW, 1.0), ({"__name__": "b"}, NOW, 2.0)]),
        ("a  value=1   7000", [({"__name__": "a"}, 7, 1.0)]),
        ("", []),
    ],
)
def test_lines_become_samples(text: str, expected: list[tuple[dict[str, str], int, float]]) -> None:
    assert rows(text) == expected


@pytest.mark.parametrize(("precision", "expected"), [("s", 5_000_000), ("ms", 5_000), ("us", 5), ("u", 5), ("ns", 0)])
def test_the_precision_of_times(precision: str, expected: int) -> None:
    assert rows("a value=1 5", precision)[0][1] == expected


def test_texts_are_counted() -> None:
    assert decode_lines(b'a x="1",y="2",z=3', NOW).left_out == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a value=1\nb", "line 2"),
        (",x=1 value=1", "a measurement"),
        ("a,=1 value=1", "the key of a tag"),
        ("a,x value=1", "'='"),
        ("a,x= value=1", "the value of a tag"),
        ("a,x=1,x=2 value=1", "twice"),
        ("a,__name__=b value=1", "__name__"),
        ("a value=", "the value of a field"),
        ("a value=x", "not a number"),
        ("a value=1_000", "not a number"),
        ("a value=nan", "not a number"),
        ("a value=1,", "the key of a field"),
        ('a value="x', "no closing quote"),
        ("a value=1 soon", "not a time"),
        ("a value=1 99999999999999999999", "not a time"),
        ("a value=1 9999999999999999999 x", "not a time"),
        ("a" + "".join(f",t{n}=x" for n in range(65)) + " value=1", "more than 64 tags"),
        ("a " + ",".join(f"f{n}=1" for n in range(1_025)), "more than 1024 fields"),
    ],
)
def test_malformed_lines_are_refused(text: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason) as refused:
        decode_lines(text.encode(), NOW)
    assert "\n" not in str(refused.value)


def test_other_bodies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match="UTF-8"):
        decode_lines(b"a value=\xff", NOW)
    with pytest.raises(Invalid, match="precision"):
        decode_lines(b"a value=1", NOW, "h")
    with pytest.raises(Invalid, match="is the precision right"):
        decode_lines(b"a value=1 1700000000000000000", NOW, "s")
    monkeypatch.setattr("penstock.http.line_protocol.BODY_BYTES_MAX", 5)
    with pytest.raises(Invalid, match="at most 5"):
        decode_lines(b"a value=1", NOW)


@given(st.text(alphabet='ab,= \\"\n1i.t#', max_size=60))
def test_random_lines_are_refused_or_decoded(text: str) -> None:
    try:
        columns = decode_lines(text.encode(), NOW)
    except Invalid as refused:
        assert "\n" not in str(refused)
    else:
        assert len(columns.index) == len(columns.values)
