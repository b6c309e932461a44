"""Damage to every file of a store: what opens shows the exact data, anything else is an error that names the file.

Files are damaged by a flipped bit, a cut, a run of zeros, their loss, another file of the same kind in their place, or
an older copy of themselves or of their folder; in a store that was closed, and in one whose process was killed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flip_child
import pytest

from penstock.archive.framed import MAGIC

Image = dict[str, bytes]  # path in the store: content
SCRIPT = str(Path(flip_child.__file__))
ANSWER_S_MAX = 60
KINDS = ("flip", "flip", "flip", "cut", "zeros", "lose", "swap", "older", "older folder")


@dataclass(frozen=True)
class Damage:
    kind: str
    path: str  # of a file, or of a folder
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} {self.path} ({self.detail})"


class Opener:
    """A process that opens stores; after its death another one."""

    def __init__(self, bug: str) -> None:
        self._bug = bug
        self._child: subprocess.Popen[str] | None = None

    def open(self, root: Path) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, SCRIPT, "open", self._bug],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{root}\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            return {"outcome": "died", "text": f"the process ended with {self._child.wait(ANSWER_S_MAX)}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._child is not None:
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.close()
            self._child.stdout.close()
            self._child.wait(ANSWER_S_MAX)


@contextmanager
def opener(bug: str = "") -> Iterator[Opener]:
    child = Opener(bug)
    try:
        yield child
    finally:
        child.close()


def load(root: Path) -> Image:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def lay_out(image: Image, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name, content in image.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def build(root: Path, part: int, end: str) -> Image:
    subprocess.run([sys.executable, SCRIPT, "build", str(root), str(part), end], check=True, timeout=120)
    return load(root)


@dataclass(frozen=True)
class Images:
    older: Image  # closed
    closed: Image
    killed: Image

    def damaged(self, chance: random.Random) -> tuple[Image, Damage]:
        """A store that was closed or killed, with one damage."""
        killed = chance.random() < 0.3
        image = dict(self.killed if killed else self.closed)
        kind = chance.choice(KINDS)
        if kind == "older folder":
            folder = chance.choice(sorted({name.rpartition("/")[0] for name in self.older if "/" in name}))
            old_names = {name for name in image if name.startswith(f"{folder}/")}
            copies = {name: content for name, content in self.older.items() if name.startswith(f"{folder}/")}
            image = {name: content for name, content in image.items() if name not in old_names} | copies
            return image, Damage(kind, folder, "killed" if killed else "closed")
        tail = max(name for name in image if name.startswith("journal/"))
        # The end of a killed journal may be torn: nobody can tell that from damage.
        names = [name for name in image if not (killed and name == tail)]
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(_group(name), []).append(name)
        path = chance.choice(groups[chance.choice(sorted(groups))])
        detail = "killed, " if killed else "closed, "
        detail += self._damage(image, path, kind, chance)
        return image, Damage(kind, path, detail)

    def _damage(self, image: Image, path: str, kind: str, chance: random.Random) -> str:
        content = bytearray(image[path])
        at = chance.randrange(len(content)) if content else 0
        if kind == "lose":
            del image[path]
            return ""
        if kind == "swap":
            other = chance.choice([name for name in image if _group(name) == _group(path)])
            image[path] = image[other]
            return f"with {other}"
        if kind == "older":
            image[path] = self.older.get(path, image[path])
            return ""
        if kind == "flip" and content:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "zeros":
            size = min(chance.randint(1, 512), len(content) - at)
            content[at : at + size] = bytes(size)
        image[path] = bytes(content)
        return f"byte {at} of {len(content)}"


def _group(name: str) -> str:
    """Files of one kind, so that few large ones are damaged as often as many small ones."""
    folder, _, file = name.rpartition("/")
    if folder.startswith("tables/"):
        return file.rpartition(".")[2] + ("-log" if folder.endswith("-log") else "")
    return folder or name


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    root = tmp_path_factory.mktemp("flips")
    older = build(root / "store", 0, "close")
    lay_out(older, root / "killed")
    closed = build(root / "store", 1, "close")
    killed = build(root / "killed", 1, "kill")
    return Images(older, closed, killed)


def verdict(answer: dict[str, Any], expected: dict[str, Any], image: Image, damage: Damage) -> str | None:
    """What is wrong with the outcome of a trial."""
    if answer["outcome"] == "read":
        wrong = [name for name in {*expected, *answer["seen"]} if answer["seen"].get(name) != expected.get(name)]
        return f"opened, and shows other {wrong}: {_short(answer['seen'], expected, wrong)}" if wrong else None
    if answer["outcome"] != "error":
        return str(answer["text"])
    # Of what is lost only the place can be named, and of a file in the place of another both may be.
    folder = damage.path.rpartition("/")[0] or damage.path
    if damage.path not in answer["text"] and folder not in answer["text"]:
        return f"the error does not name the file: {answer['text']}"
    return None


def _short(content: dict[str, Any], expected: dict[str, Any], wrong: list[str]) -> str:
    return "; ".join(f"{name}: {str(content.get(name))[:200]} not {str(expected.get(name))[:200]}" for name in wrong)


def trials(images: Images, root: Path, count: int, seed: int, mode: str = "") -> tuple[Counter[str], list[str]]:
    """Damage a store so many times; how trials ended, and all that was wrong."""
    chance, outcomes, wrong = random.Random(seed), Counter[str](), list[str]()
    with opener(mode) as child:
        expected = {}
        for name in ("closed", "killed"):
            lay_out(getattr(images, name), root)
            answer = child.open(root)
            assert answer["outcome"] == "read", answer
            assert "later" not in answer["seen"]
            expected[name] = answer["seen"]
        assert expected["closed"] == expected["killed"]
        for number in range(count):
            image, damage = images.damaged(chance)
            lay_out(image, root)
            answer = child.open(root)
            outcomes[f"{damage.kind}: {answer['outcome']}"] += 1
            reason = verdict(answer, expected["closed"], image, damage)
            if reason is not None:
                wrong.append(f"trial {number} of seed {seed}: {damage}: {reason}")
    return outcomes, wrong


def test_the_store_has_every_kind_of_file(images: Images) -> None:
    for image in (images.closed, images.killed):
        groups = {_group(name) for name in image}
        assert {"STORE", "RESERVE", "manifest", "manifest.owner", "manifest.backup-1", "journal"} <= groups
        assert {"sst", "idx", "data", "current", "1", "2", "log-log"} <= groups
        assert len([name for name in image if name.startswith("journal/")]) > 1
        assert len([name for name in image if name.endswith(".data")]) > 4
        assert len([name for name in image if image[name][:8] == MAGIC]) > 4  # encrypted sstables and indexes


def test_some_damage(images: Images, tmp_path: Path) -> None:
    outcomes, wrong = trials(images, tmp_path / "store", 60, 1)
    assert wrong == []
    assert sum(count for name, count in outcomes.items() if name.endswith("error")) > 20
    assert sum(count for name, count in outcomes.items() if name.endswith("read")) > 5


def no_end(image: Image) -> Damage:
    tail = max(name for name in image if name.startswith("journal/"))
    del image[tail]
    return Damage("lose", tail, "")


def no_spill(image: Image) -> Damage:
    for name in [name for name in image if "-log/" in name]:
        del image[name]
    return Damage("lose", "tables/3/0-log", "")


def rows_left_out(image: Image) -> Damage:
    """Pages of the manifest with rows of sstables say that they have one row: no checksum of a row can tell."""
    content = bytearray(image["manifest"])
    for page in range(2 * 4096, len(content), 4096):
        page_bytes = bytes(content[page : page + 4096])
        is_root = b"chunk_catalog" in page_bytes  # the names of all tables stand there, beside what an older use left
        if page_bytes[10] == 2 and b".sst" in page_bytes and b"1-" in page_bytes and not is_root:
            content[page + 12 : page + 14] = (16 + 2).to_bytes(2, "little")
    assert content != image["manifest"]
    image["manifest"] = bytes(content)
    return Damage("flip", "manifest", "")


@pytest.mark.parametrize(("bug", "damage"), [("journal", no_end), ("spill", no_spill), ("manifest", rows_left_out)])
def test_a_store_that_compares_less_is_caught(
    images: Images, tmp_path: Path, bug: str, damage: Callable[[Image], Damage]
) -> None:
    verdicts = []
    for seeded in ("", bug):
        with opener(seeded) as child:
            lay_out(images.closed, tmp_path / "store")
            expected = child.open(tmp_path / "store")["seen"]
            image = dict(images.closed)
            done = damage(image)
            lay_out(image, tmp_path / "store")
            verdicts.append(verdict(child.open(tmp_path / "store"), expected, image, done))
    assert verdicts[0] is None
    assert verdicts[1] is not None


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("seed", "mode"), [(10, ""), (11, ""), (12, ""), (13, ""), (14, "large manifest")])
def test_much_damage(images: Images, tmp_path: Path, seed: int, mode: str) -> None:
    outcomes, wrong = trials(images, tmp_path / "store", 600, seed, mode)
    print(dict(outcomes))
    assert wrong == []
