"""The example with texts, and a pyarrow expression on attributes that are not applied yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from examples import texts

import penstock


def test_the_texts_answer_their_questions(tmp_path: Path) -> None:
    assert texts.main(str(tmp_path / "store")) == ["text-2", "text-4", "text-6"]
    assert np.array_equal(texts.embed(["a word"]), texts.embed(["A WORD!"]))


def test_an_expression_knows_the_attributes_of_ones_own_writes(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=2)
        docs.upsert("a", [1.0, 0.0], {"year": 1990}, durable=True)
        docs.upsert(["b", "c"], [[1.0, 0.1], [0.9, 0.0]], [{"lang": "en"}, {"year": 1.5}])
        where = (pc.field("lang") == "en") | (pc.field("year") < 2)
        assert {hit.id for hit in docs.search([1.0, 0.0], where=where)} == {"b", "c"}


def test_an_expression_means_the_same_in_every_shard(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=2, shards=4)
        ids = [f"doc-{number}" for number in range(40)]
        attributes = [{"zone": number} if number % 2 else {"year": number} for number in range(40)]
        matrix = np.random.default_rng(1).normal(size=(40, 2)).astype(np.float32)
        docs.upsert(ids, matrix, attributes, durable=True)
        hits = {hit.id for hit in docs.search([1.0, 0.0], k=40, where=pc.field("year") < 10)}
        assert hits == {f"doc-{number}" for number in range(0, 10, 2)}
