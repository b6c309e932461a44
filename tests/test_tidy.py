"""The tree keeps its own rules: layers, public surface, no ambient time, chance or files, no pickle."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"

# From the bottom up: a package may import those in lines before its own, and itself.
LAYERS = [
    {"errors"},
    {"arguments", "arrow_input"},
    {"host"},
    {"log"},
    {"manifest"},
    {"scheduler"},
    {"archive"},
    {"lsm"},
    {"journal"},
    {"replica"},
    {"partition"},
    {"coordinator"},
    {"kinds"},
    {"promql"},
    {"queue", "kv", "series", "vector"},
    {"registry"},
    {"feeds"},
    {"store"},
    {"protocol"},
    {"client"},
    {"server"},
    {"spark"},
    {"aio"},
    {"http"},
    {"cli"},
]

PURE_OS = {"os.path", "os.getpid"}  # they touch no file
AMBIENT = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "sleep", "perf_counter"},
    "os": None,
    "random": None,
    "secrets": None,
    "tempfile": None,
    "shutil": None,
    "datetime": {"now", "utcnow", "today"},
}
# Who may touch the operating system beside host/, and why.
EXEMPT: dict[str, set[str]] = {
    # Sockets and the private folder they are in are no files of the store, and no simulated disk has them.
    "protocol/locator.py": {
        "open",
        "os.chmod",
        "os.fsencode",
        "os.getuid",
        "os.listdir",
        "os.lstat",
        "os.mkdir",
        "os.rename",
        "os.rmdir",
        "os.unlink",
        "tempfile.gettempdir",
        "tempfile.mkdtemp",
    },
    # The command: its environment, its terminal, a folder to try a disk in.
    "cli/__init__.py": {  # its own streams
        "os.O_RDWR",
        "os.O_WRONLY",
        "os.close",
        "os.devnull",
        "os.dup2",
        "os.open",
        "os.set_inheritable",
        "open",
    },
    "cli/app.py": {"os.environ"},
    "cli/bench.py": {"tempfile.TemporaryDirectory"},
    "cli/configuration.py": {"os.environ"},
    "cli/formatting.py": {"os.fsencode"},  # of arguments
    "cli/kv.py": {"os.fsencode"},
    "cli/output.py": {"os.environ", "shutil.get_terminal_size"},
    "cli/series.py": {"shutil.get_terminal_size"},
    # Spark's driver: its environment and its java, a folder of its own.
    "spark/sessions.py": {"os.environ", "shutil.which"},
    "spark/exactly_once.py": {"tempfile.mkdtemp"},
    # A task looks whether it sees the store's folder, and builds files elsewhere if it does not.
    "spark/maintenance.py": {"tempfile.TemporaryDirectory"},
    "spark/table_ref.py": {"os.environ"},
    "spark/format.py": {"shutil.which"},
    "client/building.py": {"tempfile.TemporaryDirectory"},  # a folder for files that are sent to the owner
    "client/starting.py": {"os.close", "os.environ", "os.pipe", "os.read"},  # of the owner that it starts
    "server/__main__.py": {"os.O_RDWR", "os.close", "os.devnull", "os.dup2", "os.open"},  # its own output
}


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(), str(path))) for path in sorted(SOURCE.rglob("*.py"))]


def layer_of(package: str) -> int:
    for number, packages in enumerate(LAYERS):
        if package in packages:
            return number
    raise AssertionError(f"say in LAYERS of {__file__} where the package {package!r} stands")


def package_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative imports hide the layer"
            yield node, node.module
            if node.module == "penstock":
                yield from ((node, f"penstock.{alias.name}") for alias in node.names)


def upward_imports(path: Path, tree: ast.Module) -> list[str]:
    package = package_of(path)
    if package in ("testing", "__init__", "__main__"):
        return []
    problems = []
    for node, name in imported(tree):
        if not name.startswith("penstock.") or (other := name.split(".")[1]) == package:
            continue
        if other == "testing" or layer_of(other) >= layer_of(package):
            problems.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {name}")  # type: ignore[attr-defined]
    return problems


def ambient_calls(path: Path, tree: ast.Module) -> list[str]:
    package = package_of(path)
    if package in ("host", "testing"):
        return []
    modules_here = {name for _, name in imported(tree)}
    exempt = EXEMPT.get(str(path.relative_to(SOURCE)), set())
    problems = []
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            base, name = node.value.id, f"{node.value.id}.{node.attr}"
            banned = AMBIENT.get(base, set())
            if (
                base not in AMBIENT
                or base not in modules_here
                or name in PURE_OS
                or (banned is not None and node.attr not in banned)
            ):
                continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            name = "open"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            name = next((n for n in names if n in ("pickle", "shelve", "marshal", "dill", "cloudpickle")), "")
        if name and name not in exempt:
            problems.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {name}")  # type: ignore[attr-defined]
    return problems


def test_imports_go_down_only() -> None:
    assert [line for path, tree in modules() for line in upward_imports(path, tree)] == []


def test_nothing_ambient_outside_host() -> None:
    assert [line for path, tree in modules() for line in ambient_calls(path, tree)] == []


@pytest.mark.parametrize(
    ("where", "source", "rule"),
    [
        ("host/x.py", "from penstock.log import Log", upward_imports),
        ("log/x.py", "import penstock.testing", upward_imports),
        ("log/x.py", "from penstock import testing", upward_imports),
        ("log/x.py", "import time\ntime.time()", ambient_calls),
        ("log/x.py", "import os\nos.fsync(1)", ambient_calls),
        ("log/x.py", "open('x')", ambient_calls),
        ("log/x.py", "import random\nrandom.random()", ambient_calls),
        ("log/x.py", "import pickle", ambient_calls),
    ],
)
def test_the_rules_can_fail(where: str, source: str, rule: object) -> None:
    assert rule(SOURCE / where, ast.parse(source))  # type: ignore[operator]


def test_a_class_name_is_defined_once() -> None:
    homes: dict[str, list[str]] = {}
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


# Participles and pronouns say that a value exists, not what it is: `rows`, not `found`; `lease`, not `held`.
VAGUE = {"asked", "cut_off", "engaged", "found", "given", "gone", "held", "kept", "known", "made", "offered", "place"}
VAGUE |= {"places", "received", "said", "seen", "settle", "settled", "shown", "sound", "tend", "told", "wanted"}
VAGUE |= {"what", "who"}
# Names that programs outside call, the field of a public report, the key of JSON, and the field of a format.
VAGUE_AND_PUBLIC = {
    "archive_settings.py": {"kept"},
    "archiving.py": {"kept"},
    "chunks.py": {"kept"},
    "port.py": {"tend"},
    "shim.py": {"seen"},
    "status.py": {"seen"},
    "test_earlier_names.py": {"place", "tend"},
    "test_store_archive.py": {"kept"},
    "tokens.py": {"seen"},
}


def vague_names(code: CodeType) -> set[str]:
    """Those of a module and of all its functions; to compile is faster than to walk the tree."""
    names = {code.co_name, *code.co_varnames, *code.co_cellvars, *code.co_names}
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name for name in names if name.strip("_").lower() in VAGUE}.union(*map(vague_names, inner))


def test_names_say_what_a_value_is() -> None:
    problems = []
    for folder in ("src", "tests", "bench", "examples", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            allowed = VAGUE_AND_PUBLIC.get(path.name, set()) | {"given" for _ in re.findall("from hypothesis", source)}
            names = vague_names(compile(source, str(path), "exec", dont_inherit=True)) - allowed
            problems += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert problems == []
    seeded = "class Held:\n    def f(self, told): _found = self.kept = [rows for given in told]\nrows = 1"
    assert vague_names(compile(seeded, "x", "exec")) == {"Held", "told", "_found", "kept", "given"}


# Private names of other libraries, for which there is no public one.
OF_OTHERS = {"_asdict", "_ensure_initialized", "_fields", "_getframe", "_jsc", "_make", "_replace"}
OF_OTHERS |= {"_RAFT_STATE", "_SyncObj__onMessageReceived", "_SyncObj__setCurrentTerm"}  # PySyncObj's
OF_OTHERS |= {"_create_judf", "_gateway", "_jdf", "_jsparkSession", "_jvm", "_temp_dir"}  # Spark's


def private_uses(path: Path, tree: ast.Module, own_names: set[str]) -> list[str]:
    """Private names that a module takes from another package, where `own_names` are those of its own."""
    problems = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names = [node.attr]
        private = [name for name in names if re.match("_[^_]", name) and name not in own_names | OF_OTHERS]
        problems += [f"{path.relative_to(ROOT)}:{node.lineno} uses {name}" for name in private]  # type: ignore[attr-defined]
    return problems


def names_defined(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a slot
    return names


def test_private_names_stay_in_their_package() -> None:
    own_names: dict[str, set[str]] = {}
    for path, tree in modules():
        own_names.setdefault(package_of(path), set()).update(names_defined(tree))
    uses = [
        use
        for path, tree in modules()
        if package_of(path) != "testing"
        for use in private_uses(path, tree, own_names[package_of(path)])
    ]
    assert uses == []
    seeded = ast.parse("from penstock.lsm.tree import _Overlay\nstore._port.table('x')\nself._port")
    assert len(private_uses(SOURCE / "spark" / "x.py", seeded, {"_other"})) == 2


def test_every_module_says_its_job() -> None:
    silent = [str(path.relative_to(ROOT)) for path, tree in modules() if not ast.get_docstring(tree)]
    assert silent == []


@pytest.mark.parametrize("name", ["penstock", "penstock.log", "penstock.testing"])
def test_all_is_the_public_surface(name: str) -> None:
    module = importlib.import_module(name)
    hidden = ("annotations", "TYPE_CHECKING", "Any")
    public = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and not isinstance(value, type(importlib)) and attribute not in hidden
    }
    assert public <= set(module.__all__)
    assert all(getattr(module, attribute) is not None for attribute in module.__all__)


def test_banned_names_and_unfinished_work() -> None:
    for path, _ in modules():
        assert path.stem not in ("utils", "helpers", "common", "misc"), path
        unfinished = re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
        assert unfinished is None, f"{path}: {unfinished}"


def test_every_format_and_decision_has_its_page() -> None:
    adr = ROOT / "docs" / "adr"
    index = (adr / "README.md").read_text()
    pages = sorted(path.name for path in adr.glob("[0-9]*.md"))
    assert len({name[:4] for name in pages}) == len(pages), "two decisions have one number"
    assert [name for name in pages if name not in index] == []
    assert (ROOT / "docs" / "format" / "log.md").exists()


# -- the architecture page tells of this tree


def table_rows(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def packages() -> set[str]:
    return {package_of(path) for path, _ in modules()} - {"__init__", "__main__", "testing"}


def check_order(names: list[str]) -> None:
    """The packages of the tree, each once, from the top down; those of one layer in any order."""
    assert sorted(names) == sorted(packages())
    assert sorted(map(layer_of, names), reverse=True) == [layer_of(name) for name in names]


def test_the_architecture_page_lists_every_package_in_order() -> None:
    listed = [name for row in table_rows("The packages") for name in re.findall(r"`(\w+)`", row[0])]
    assert listed[-1] == "testing"
    check_order(listed[:-1])


def test_the_docstring_of_penstock_lists_every_package_in_order() -> None:
    check_order(names_listed((SOURCE / "__init__.py").read_text()))


# -- the docstring of a package is a map of its modules


def names_listed(source: str) -> list[str]:
    """The names in the lists of a package's docstring: lines like `    name, name  what they are for`."""
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    lines = re.findall(r"^    ([a-z_]\w*(?:, [a-z_]\w*)*)  +\S", docstring, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def map_faults(source: str, present: set[str]) -> list[str]:
    """What is wrong with the map in a package's source, where `present` are its modules and packages."""
    listed = names_listed(source)
    return [
        *(f"{name} is not listed" for name in sorted(present - set(listed))),
        *(f"{name} does not exist" for name in sorted(set(listed) - present)),
        *(f"{name} is listed twice" for name in sorted({name for name in listed if listed.count(name) > 1})),
    ]


def test_the_docstring_of_every_package_lists_its_modules() -> None:
    faults = []
    for file in sorted(SOURCE.glob("*/**/__init__.py")):
        package = file.parent
        present = {path.stem for path in package.glob("*.py")} - {"__init__"}
        present |= {path.parent.name for path in package.glob("*/__init__.py")}
        faults += [f"{package.relative_to(SOURCE)}: {fault}" for fault in map_faults(file.read_text(), present)]
    assert faults == []


def test_the_rule_for_maps_can_fail() -> None:
    seeded = '"""A package.\n\n    here    a module\n    gone    another\n    here    again\n    Class   no module\n"""'
    assert map_faults(seeded, {"here", "new"}) == ["new is not listed", "gone does not exist", "here is listed twice"]
    assert map_faults(seeded.replace("gone", "new ").replace("here    again", "f()     again"), {"here", "new"}) == []


def test_every_word_of_the_architecture_page_stands_for_something() -> None:
    defined: set[str] = set()
    for _, tree in modules():
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Assign):
                defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
    words = [name for row in table_rows("Words, each with one meaning") for name in re.findall(r"`(\w+)`", row[-1])]
    assert len(words) > 20
    assert [name for name in words if name not in defined] == []


def test_every_path_of_the_architecture_page_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Where to read next", 1)[1]
    paths = [path.removeprefix("penstock/") for path in re.findall(r"`([\w/]+\.py)`", text)]
    assert len(paths) > 5
    assert [path for path in paths if not (SOURCE / path).exists()] == []
