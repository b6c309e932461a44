"""The kind `vector` passes the contract of kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.registry import vector_kind
from penstock.testing.kinds import KindContract, KindSample, QuerySample
from penstock.vector.attributes import encode_attributes
from penstock.vector.searching import SearchQuery, encode_search
from penstock.vector.section import Deletes, IndexChange, Upserts, VectorSection, encode_section


def _vector(number: int) -> list[float]:
    return [number + 1.0, *[0.0] * 383]  # all of one direction: its cosine is exactly 1


def _upserts(*rows: tuple[str, int, dict[str, Any] | None]) -> Upserts:
    return Upserts(
        [name.encode() for name, _, _ in rows],
        np.array([_vector(number) for _, number, _ in rows], np.float32),
        [encode_attributes(attributes) for _, _, attributes in rows],
    )


def _nearest(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """The answer to a search of one vector that is there: itself, at the distance 0."""
    return [{"query": 0, "rank": 1, "id": "id 5", "distance": 0.0, "attributes": '{"n":5}'}] if 5 in numbers else []


class TestVector(KindContract):
    sample = KindSample(
        kind=vector_kind(),
        write=lambda table, number: table.upsert(f"id {number}", _vector(number), {"n": number}),
        rows=lambda table: sorted(
            (row["id"], row["vector"][:2], row["attributes"]) for row in table.to_arrow().to_pylist()
        ),
        expected=lambda numbers: sorted((f"id {n}", _vector(n)[:2], f'{{"n":{n}}}') for n in numbers),
        sections=[
            VectorSection(_upserts(("a", 1, None), ("b", 2, {"x": "y", "z": 1.5}))),
            VectorSection(Deletes([b"b", b"nobody"]), _upserts(("a", 3, {"on": True}))),
        ],
        refused=[
            b"",
            encode_section(VectorSection()),
            encode_section(VectorSection(IndexChange(generation=1))),
            encode_section(VectorSection(Upserts([b"a"], np.ones((1, 3), np.float32), []))),
            encode_section(VectorSection(Upserts([b"a"], np.full((1, 384), np.nan, np.float32), []))),
            encode_section(VectorSection(Upserts([b"a"], np.zeros((1, 384), np.float32), []))),
            encode_section(VectorSection(Upserts([b"\xff"], np.ones((1, 384), np.float32), []))),
            encode_section(VectorSection(Upserts([b"a"], np.ones((1, 384), np.float32), [b'{"a":[]}']))),
            encode_section(VectorSection(Deletes([b""]))),
        ],
        arrow=lambda numbers: pa.table(
            {
                "id": [f"id {number}" for number in numbers],
                "vector": pa.array(list(map(_vector, numbers)), pa.list_(pa.float64())),
                "n": list(numbers),
            }
        ),
        queries=[
            QuerySample(
                name="search",
                argument=encode_search(
                    SearchQuery(vectors=np.array(_vector(5), np.float32).tobytes(), k=1, where={"n": 5})
                ),
                answer=_nearest,
            ),
            QuerySample(name="count", argument=b"", answer=lambda numbers: [{"count": len(numbers)}]),
        ],
    )
