"""The site: every page is in it, and the page of benchmarks is what its record gives."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import page
from bench.charts import panels_of, ratio_bars

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def pages_in(nav: Any) -> Iterator[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    yaml = pytest.importorskip("yaml")
    named = sorted(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    decisions = {name for name in there if name.startswith("adr/0")}  # adr/README.md lists them
    assert named == sorted(there - decisions)


def test_every_decision_is_in_its_list() -> None:
    listed = (DOCS / "adr" / "README.md").read_text()
    assert [path.name for path in (DOCS / "adr").glob("0*.md") if f"({path.name})" not in listed] == []


def dead_links(path: Path, text: str) -> list[str]:
    """Links of a page to what is not a file of the site: `make docs` refuses them."""
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [one for one in targets if not (file := (path.parent / one).resolve()).is_file() or DOCS not in file.parents]


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_every_link_leads_to_a_page_of_the_site(path: Path) -> None:
    assert dead_links(path, path.read_text()) == []


def test_a_dead_link_is_seen() -> None:
    assert dead_links(DOCS / "index.md", "[a](format) [b](../README.md) [c](limits.md#x) [d](https://e.org)") == [
        "format",
        "../README.md",
    ]


def test_examples_in_docstrings_become_code_blocks() -> None:
    fences = pytest.importorskip("tools.doctest_fences")  # it needs griffe, which `make docs` installs
    assert fences.fenced("Add.\n\n>>> 1 + 1\n2\n\nMore.") == "Add.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def record_of(**more: Any) -> dict[str, Any]:
    machine = {
        "python": "3", "system": "Linux", "processor": "p", "cores": 2, "memory_gib": 1, "load": 0.5, "versions": {},
    }  # fmt: skip
    return {"title": "kv", "quick": False, "time": "2026-01-01 00:00", "machine": machine, **more}


COMPARED = record_of(
    rounds=3,
    cases=[
        {"name": "put", "unit": "/s", "peer_of": None},
        {"name": "Peer A", "unit": "/s", "peer_of": "put"},
        {"name": "Peer B", "unit": "/s", "peer_of": "put"},
    ],
    medians={"put": 900.0, "Peer A": 300.0, "Peer B": 1_000.0},
    goals=[{"ours": "put", "ratio": 1.0, "gate": True, "peer": "", "measured": 0.9, "held": False}],
)
BY_ITSELF = record_of(
    title="size",
    numbers=[
        {"name": "bytes a row", "value": 1.5, "unit": "B", "most": 2.0, "least": None, "gate": True, "held": True},
        {"name": "rows a page", "value": 4.0, "unit": "", "most": None, "least": 5.0, "gate": False, "held": False},
    ],
)


def test_the_page_says_first_where_a_peer_wins_and_why() -> None:
    text = page.render([COMPARED, BY_ITSELF], {"kv": {"put": "it is slow"}})
    losing = text.split("## All ratios", maxsplit=1)[0]
    assert "| kv | put | 900.0 /s | Peer B: 1.0 k/s | 0.90 | 1 (gate): **missed** | it is slow |" in losing
    assert "| size | rows a page | 4.00 |  |  | at least 5: **missed** | *not explained yet* |" in losing
    assert losing.index("| kv | put |") < losing.index("| size | rows a page |")  # a gate comes before a goal
    assert "1 of them are not explained yet." in losing
    assert text.count("Measured on 2 cores of p, 1 GiB, Linux, with Python 3.") == 1  # the same for all: said once
    assert "bytes a row" not in losing
    assert "| bytes a row | 1.50 B |  |  | at most 2 (gate) |" in text
    assert "2 figures have gates, which must hold for a release; 1 hold theirs." in text


def test_the_page_is_what_its_record_gives() -> None:
    record = page.load(page.RECORD)
    files = {"benchmarks.md": page.render(record, tomllib.loads(page.REASONS.read_text()))}
    files |= {f"benchmarks/{name}": text for name, text in page.charts(record).items()}
    stale = [name for name, text in files.items() if (DOCS / name).read_text() != text]
    assert stale == [], "run python -m bench.page"


def test_a_ratio_has_the_spread_of_its_rounds() -> None:
    figures = {"put": [900.0, 950.0, 880.0], "Peer A": [300.0] * 3, "Peer B": [1_000.0, 900.0, 1_100.0]}
    text = page.render([{**COMPARED, "figures": figures}], {})
    assert "| 0.90 (0.80 to 1.06) |" in text  # beside the best peer, round by round
    once = {name: some[:1] for name, some in figures.items()}
    assert "| 0.90 |" in page.render([{**COMPARED, "figures": once}], {})  # one round has no spread


def test_a_busy_machine_is_told() -> None:
    busy = {**COMPARED, "machine": {**COMPARED["machine"], "load": 9.0}}
    assert "the machine was busy (load 9.0)" in page.render([busy], {})
    assert "busy" not in page.render([COMPARED], {})


def test_rates_are_written_as_people_write_them() -> None:
    assert page.amount(3_369_627, "rows/s") == "3.4 M rows/s"
    assert (page.amount(12.0, "/s"), page.amount(1_200.0, "/s")) == ("12.0 /s", "1.2 k/s")


def test_charts_place_ours_on_the_side_of_the_winner() -> None:
    bars = ratio_bars([("slow <&>", 0.5), ("fast", 20.0)])
    assert bars.count("<rect") == 2
    assert "slow &lt;&amp;&gt;" in bars
    growth = panels_of({"puts": {"ours": [(1, 1.0), (1_000_000, 2.0)]}})
    assert growth.count("<polyline") == 1
    assert ">100 k<" in growth
    assert ">1 M rows<" in growth
    assert "30 min" in panels_of({"memory": {"": [(0, 1.0), (60, 2.0)]}}, over_time=True)
