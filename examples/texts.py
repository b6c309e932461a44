"""Texts found by what they say: embeddings of a small hashing model, searched with and without a filter.

The model hashes words and groups of three letters into a vector. It is deterministic and downloads nothing; one that
was trained on language finds more, and is used in the same way.

    python -m examples.texts [FOLDER]
"""

from __future__ import annotations

import re
import sys
import tempfile
import zlib

import numpy as np
import numpy.typing as npt

import penstock

DIMENSIONS = 256
TEXTS = [
    ("en", "The journal is written and synced before a write is acknowledged."),
    ("en", "A queue hands each message to one consumer, under a lease."),
    ("en", "A lease that expires gives the message to another consumer."),
    ("en", "Samples of a time series are compressed in columns."),
    ("en", "Compaction merges sorted files and drops deleted rows."),
    ("en", "Vectors that are near each other mean something similar."),
    ("de", "Das Journal wird geschrieben und gesichert, bevor ein Schreiben bestätigt wird."),
    ("de", "Eine Warteschlange gibt jede Nachricht an einen Verbraucher."),
    ("de", "Die Verdichtung mischt sortierte Dateien und entfernt gelöschte Zeilen."),
]


def embed(texts: list[str]) -> npt.NDArray[np.float32]:
    """Return a vector for each text: its words and groups of three letters, hashed, each with a sign."""
    matrix = np.zeros((len(texts), DIMENSIONS), np.float32)
    for row, text in zip(matrix, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            padded = f"<{word}>"
            for part in [padded] + [padded[at : at + 3] for at in range(len(padded) - 2)]:
                code = zlib.crc32(part.encode())
                row[code % DIMENSIONS] += 1.0 if code & 0x8000_0000 else -1.0
    return matrix


def main(folder: str) -> list[str]:
    """Store the texts, ask three questions, and return the id of the best answer to each."""
    questions = [
        ("when is a message given to another consumer", None),
        ("sorted files are merged", {"lang": "en"}),
        ("what happens before a write is acknowledged", {"lang": "de"}),
    ]
    best = []
    with penstock.open(folder) as store:
        texts = store.vector("texts", dimensions=DIMENSIONS, metric="cosine")
        ids = [f"text-{number}" for number in range(len(TEXTS))]
        attributes = [{"lang": lang, "text": text} for lang, text in TEXTS]
        epoch = texts.upsert(ids, embed([text for _, text in TEXTS]), attributes=attributes)
        for question, where in questions:
            hits = texts.search(embed([question])[0], k=2, where=where, after=epoch)
            best.append(hits[0].id)
            print(f"{question}? {where or ''}")
            for hit in hits:
                print(f"  {hit.distance:.3f}  {hit.id}  {hit.attributes['text']}")
    return best


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as spare:
        main(sys.argv[1] if sys.argv[1:] else f"{spare}/store")
