"""Records what Prometheus answers to the expressions of the conformance suite, as golden files.

    PENSTOCK_PEERS=folder-with-prometheus python tools/record_promql.py

Only expressions that have no answer yet are asked; delete a file to record all of it anew.

Prometheus drops metric names at once by default. Where that makes it refuse a query because two series become one, the
answer with names dropped at the end is recorded instead, which is what Penstock does.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "promql"))

from prometheus_peer import DELAYED, prometheus  # noqa: E402
from promql_cases import INSTANT_MS, RANGE, instant_expressions, range_expressions  # noqa: E402
from promql_dataset import dataset  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "promql"


def answer(reply: dict) -> dict:
    """Return the part of an answer that is recorded."""
    if reply["status"] == "error":
        return {"error": reply["error"]}
    kind, result = reply["data"]["resultType"], reply["data"]["result"]
    if kind in ("scalar", "string"):
        return {"kind": kind, "value": result[1]}
    return {
        "kind": kind,
        "series": [[series["metric"], series.get("values") or [series["value"]]] for series in result],
    }


def main() -> None:
    """Ask two servers, and write the files."""
    names = {"range": range_expressions(), "instant": instant_expressions()}
    old_answers = {name: load(GOLDEN / f"{name}.json.gz") for name in names}
    new = {name: [e for e in expressions if e not in old_answers[name]] for name, expressions in names.items()}
    answers: list[dict[str, dict]] = []
    for features in ((), (DELAYED,)):
        with tempfile.TemporaryDirectory() as folder, prometheus(Path(folder), dataset(), *features) as peer:
            batch = {e: answer(peer.range(e, *RANGE)) for e in new["range"]}
            batch |= {("instant", e): answer(peer.instant(e, INSTANT_MS)) for e in new["instant"]}
            answers.append(batch)
    plain, delayed = answers
    chosen = {e: delayed[e] if "same labelset" in plain[e].get("error", "") else plain[e] for e in plain}
    for name, expressions in names.items():
        golden = {e: old_answers[name].get(e) or chosen[e if name == "range" else ("instant", e)] for e in expressions}
        text = json.dumps(golden, indent=0, sort_keys=True, ensure_ascii=False)
        (GOLDEN / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        errors = sum("error" in entry for entry in golden.values())
        print(f"{name}: {len(golden)} expressions, {len(new[name])} of them new, {errors} refused")


def load(path: Path) -> dict[str, dict]:
    """Return the answers of a file; none if there is no file."""
    return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}


if __name__ == "__main__":
    main()
