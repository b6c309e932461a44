"""`python -m bench.page`: make docs/benchmarks.md and its charts from the record of the last runs.

`bench/results/` has the figures of this machine's runs. Those of full size become the record, `bench/record/`, which is
kept with the sources, and the page is a function of the record and of `bench/reasons.toml`, which says for each figure
that missed what it wanted why that is. Nobody writes figures into the page by hand: a test makes it anew and compares.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.charts import panels_of, ratio_bars
from bench.harness import RESULTS

HERE = Path(__file__).parent
RECORD = HERE / "record"
REASONS = HERE / "reasons.toml"
DOCS = HERE.parent / "docs"
GROWTH = {
    "put_per_s": "puts a second",
    "get_per_s": "gets a second",
    "scan_100_per_s": "scans of 100 rows a second",
    "scan_rows_per_s": "rows a second of a long scan",
    "open_ms": "open to the first get, ms",
    "recovery_ms": "the same after a kill, ms",
    "compact_ms": "compaction of everything, ms",
    "close_ms": "close, ms",
    "disk_mb": "disk, MB",
    "rss_mb": "resident memory, MB",
}


SOAK = {
    "anonymous_mb": "memory of the owner, MB",
    "descriptors": "open files",
    "threads": "threads",
    "disk_mb": "disk, MB",
    "archive_mb": "archive, MB",
    "p50_ms": "durable batch, median, ms",
    "p99_ms": "durable batch, p99, ms",
}


MISSED = ": **missed**"
NO_REASON = "*not explained yet*"
Reasons = dict[str, dict[str, str]]  # by benchmark, then by figure


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure of the page, with what it was to be."""

    title: str  # of the benchmark
    figure: str
    ours: str
    peer: str
    ratio: float | None  # ours to the best peer; None where a figure stands by itself
    spread: tuple[float, float] | None = None  # the lowest and the highest ratio of a round, where rounds are recorded
    goal: str
    is_met: bool
    gate: bool


def amount(value: float, unit: str) -> str:
    """A number as people write it."""
    if not unit.endswith("/s"):
        return f"{value:,.2f} {unit}".strip() if value < 100 else f"{value:,.0f} {unit}".strip()
    things = unit.removesuffix("/s")
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {letter}{' ' if things else ''}{unit}"
    return f"{value:.1f} {unit}"


def lines_of(report: dict[str, Any]) -> Iterator[Line]:
    """The lines of one benchmark: each comparison with its goals, each figure with its limit."""
    title = report["title"]
    for case in report.get("cases", ()):
        peers = [other for other in report["cases"] if other["peer_of"] == case["name"]]
        if not peers:
            continue
        ours = report["medians"][case["name"]]
        best = max(peers, key=lambda peer: report["medians"][peer["name"]])
        theirs = report["medians"][best["name"]]
        goals = [goal for goal in report["goals"] if goal["ours"] == case["name"]]
        yield Line(
            title=title,
            figure=case["name"],
            ours=amount(ours, case["unit"]),
            peer=f"{best['name'].removeprefix(case['name'] + ': ')}: {amount(theirs, best['unit'])}",
            ratio=ours / theirs,
            spread=_spread(report, case["name"], best["name"]),
            goal=", ".join(_goal_text(goal) for goal in goals),
            is_met=all(goal["held"] for goal in goals),
            gate=any(goal["gate"] and not goal["held"] for goal in goals),
        )
    for figure in report.get("numbers", ()):
        bounds = (("at most", figure["most"]), ("at least", figure["least"]))
        limits = ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        yield Line(
            title=title,
            figure=figure["name"],
            ours=amount(figure["value"], figure["unit"]),
            peer="",
            ratio=None,
            goal=limits and f"{limits}{' (gate)' if figure['gate'] else ''}{'' if figure['held'] else MISSED}",
            is_met=figure["held"],
            gate=figure["gate"] and not figure["held"],
        )


def _spread(report: dict[str, Any], ours: str, peer: str) -> tuple[float, float] | None:
    """The lowest and the highest ratio of a round: both ran in the same one, so they met the same noise."""
    figures = report.get("figures", {})
    ratios = [one / other for one, other in zip(figures.get(ours, ()), figures.get(peer, ()), strict=True)]
    return (min(ratios), max(ratios)) if len(ratios) > 1 else None


def _goal_text(goal: dict[str, Any]) -> str:
    """What a ratio should be, and whether it is not; of one peer among several, also what it is."""
    peer = f" of {goal['peer']}" if goal["peer"] else ""
    measured = f" and is {goal['measured']:.2f}" if goal["peer"] else ""
    return f"{goal['ratio']:.3g}{peer}{' (gate)' if goal['gate'] else ''}{measured}{'' if goal['held'] else MISSED}"


def table(lines: Sequence[Line], reasons: Reasons | None = None) -> list[str]:
    """The lines of one benchmark as a table; with reasons, of several, and with a column that says why."""
    several = reasons is not None
    head = [
        *(["benchmark"] if several else []),
        "what",
        "ours",
        "beside",
        "ratio",
        "wanted",
        *(["why"] if several else []),
    ]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        ratio = f"{line.ratio:.2f}" if line.ratio is not None else ""
        if line.spread is not None:
            ratio += f" ({line.spread[0]:.2f} to {line.spread[1]:.2f})"
        row = [line.figure, line.ours, line.peer, ratio, line.goal]
        rows.append(row if reasons is None else [line.title, *row, reason(line, reasons) or NO_REASON])
    return [f"| {' | '.join(row)} |" for row in rows]


def reason(line: Line, reasons: Reasons) -> str:
    """Why a figure is as it is; empty if nobody has said."""
    return reasons.get(line.title, {}).get(line.figure, "")


def loses(line: Line) -> bool:
    """Whether a peer is better, or what was wanted is missed."""
    return not line.is_met or (line.ratio is not None and line.ratio < 1)


def losing_lines(record: Sequence[dict[str, Any]]) -> list[Line]:
    """What is lost or missed: gates first, then goals, then what only a peer does better; the worst ratio first."""
    lines = [line for report in record for line in lines_of(report) if loses(line)]
    return sorted(lines, key=lambda line: (not line.gate, line.is_met, line.ratio or 0.0, line.title, line.figure))


def render(record: Sequence[dict[str, Any]], reasons: Reasons) -> str:
    """The page."""
    lines = {report["title"]: list(lines_of(report)) for report in record}
    every = [line for group in lines.values() for line in group]
    losing = losing_lines(record)
    unexplained = sum(not reason(line, reasons) for line in losing)
    machines = list(dict.fromkeys(_where(report) for report in record))
    gates = [line for line in every if "(gate)" in line.goal]
    missed = [line for line in gates if line.gate]
    page = [
        "# Benchmarks",
        "",
        "`make bench` runs us and our peers in the same run, in interleaved rounds, and makes this page from what it",
        "measured (about 40 minutes; `QUICK=1 make bench` only shows that everything runs). A ratio is ours to that of",
        "the best peer, or to what else stands beside it, and more is better; in brackets, its worst and best round.",
        "The machine is a small shared one: trust ratios to about 20 %, and absolute figures less.",
        "",
        f"{len(gates)} figures have gates, which must hold for a release; {len(gates) - len(missed)} hold theirs.",
        "",
        *machines,
        "",
        "## Where a peer wins, or a goal is missed",
        "",
        f"{len(losing)} of {len(every)} figures: first missed gates, then missed goals, then where a peer is better."
        + (f" {unexplained} of them are not explained yet." if unexplained else ""),
        "",
        *table(losing, reasons),
        "",
        "## All ratios",
        "",
        "![Ours to the best peer](benchmarks/ratios.svg)",
        "",
    ]
    if any(report["title"] == "growth" for report in record):
        page += ["## Growth", "", "![Cost against the number of rows](benchmarks/growth.svg)", ""]
    if any(report["title"] == "soak" for report in record):
        page += ["## A long load", "", "![Memory, files, threads, disk and latency over time](benchmarks/soak.svg)", ""]
    page += ["## Every benchmark", ""]
    for report in record:
        page += [f"### {report['title']}", "", *table(lines[report["title"]]), "", _measured(report), ""]
    notes = reasons.get("notes", {})
    if notes:
        page += ["## Notes", "", *(f"- **{name}**: {text}" for name, text in notes.items()), ""]
    return "\n".join(page)


def _where(report: dict[str, Any]) -> str:
    """The machine and the versions of a run: most often the same for the whole page."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, {machine['system']}"
    return f"Measured on {where}, with Python {machine['python']}{versions and ', '}{versions}."


def _measured(report: dict[str, Any]) -> str:
    machine = report["machine"]
    busy = (
        ""
        if machine["load"] <= machine["cores"] + 1
        else f"; the machine was busy (load {machine['load']}): trust only ratios"
    )
    rounds = f"Medians of {report['rounds']} rounds, " if "rounds" in report else "One run, "
    return f"*{rounds}{report['time']} UTC{busy}.*"


def charts(record: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The charts of the page, by file name."""
    ratios = sorted(
        (
            (f"{line.title}: {line.figure}", line.ratio)
            for report in record
            for line in lines_of(report)
            if line.ratio is not None
        ),
        key=lambda pair: pair[1],
    )
    files = {"ratios.svg": ratio_bars(ratios)} if ratios else {}
    for report in record:
        if report["title"] == "growth":
            files["growth.svg"] = panels_of(
                {
                    text: {
                        name: [(step["rows"], step.get(column, 0.0)) for step in steps]
                        for name, steps in report["steps"].items()
                    }
                    for column, text in GROWTH.items()
                }
            )
        if report["title"] == "soak":
            files["soak.svg"] = panels_of(
                {
                    text: {"": [(sample["s"] / 60, sample[name]) for sample in report["samples"]]}
                    for name, text in SOAK.items()
                },
                over_time=True,
            )
    return files


def load(folder: Path) -> list[dict[str, Any]]:
    """The reports of a folder, in the order of their titles."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def main() -> None:
    """Take over new results of full size into the record; make the page and its charts."""
    RECORD.mkdir(exist_ok=True)
    for path in RESULTS.glob("*.json"):
        report = json.loads(path.read_text())
        if "machine" in report and not report["quick"]:
            shutil.copy(path, RECORD / path.name)
    record = load(RECORD)
    reasons = tomllib.loads(REASONS.read_text())
    (DOCS / "benchmarks.md").write_text(render(record, reasons))
    (DOCS / "benchmarks").mkdir(exist_ok=True)
    for name, text in charts(record).items():
        (DOCS / "benchmarks" / name).write_text(text)
    print(f"docs/benchmarks.md: {len(record)} benchmarks")
    for line in losing_lines(record):
        if not reason(line, reasons):
            print(f"  not explained in bench/reasons.toml: [{line.title}] {line.figure!r}")


if __name__ == "__main__":
    main()
