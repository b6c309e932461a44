"""Builds shim.c and steers it: rules go in, the log of what failed comes out.

Thread: the campaign's, and those of the processes it steers (every field is one word).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
ENVIRONMENT = "PENSTOCK_FAULTS"  # names the block's file

# The numbers of shim.c, by name.
CALLS = ("fsync", "fdatasync", "pwrite", "ftruncate", "fallocate", "rename", "unlink", "create", "open", "mkdir")
COMPONENTS = ("journal", "sstable", "queue", "qmft", "manifest", "spill", "staged", "folder", "store")
MODES = ("fail", "half", "lost", "short", "kill", "kill half", "kill lost")
RULES, LOG, STAGED_NAMES, PATH_BYTES, TOLD_BYTES, NAME_BYTES = 16, 512, 64, 256, 104, 48


@dataclass(frozen=True)
class Rule:
    """From the `after`-th such call on, `times` of them fail."""

    call: str
    component: str
    mode: str = "fail"
    error: int = errno.EIO  # of "kill lost": 0 loses all that is not synced, another number about half of it
    after: int = 1
    times: int = 1

    @property
    def kills(self) -> bool:
        return self.mode.startswith("kill")


@dataclass(frozen=True)
class Fault:
    """A call that failed, or that killed its process."""

    call: str
    component: str
    mode: str
    error: int
    process: int
    path: str

    @property
    def kills(self) -> bool:
        return self.mode.startswith("kill")

    @property
    def kind(self) -> str:
        """What happened, in a word."""
        if self.kills or self.mode == "short":
            return self.mode
        return errno.errorcode[self.error]


class _Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("call", "component", "mode", "error")),
        ("countdown", ctypes.c_int64),
        ("times", ctypes.c_int64),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("call", "component", "mode", "error", "process", "written")),
        ("path", ctypes.c_char * TOLD_BYTES),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ("enabled", ctypes.c_int32),
        ("faults", ctypes.c_int32),
        ("seen", (ctypes.c_int64 * len(COMPONENTS)) * len(CALLS)),
        ("rules", _Rule * RULES),
        ("log", _Fault * LOG),
        ("root", ctypes.c_char * PATH_BYTES),
        ("staged", (ctypes.c_char * NAME_BYTES) * STAGED_NAMES),
    ]


def find_compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile the shim."""
    compiler, library = find_compiler(), folder / "shim.so"
    assert compiler is not None
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return library


class Shim:
    """The block that a campaign and its processes share."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(ctypes.sizeof(_Block)))
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(_Block))
        self._block = _Block.from_buffer(self._memory)

    @classmethod
    def of_this_process(cls) -> Shim:
        return cls(Path(os.environ[ENVIRONMENT]))

    def environment(self, library: Path) -> dict[str, str]:
        """For a process that is to be steered."""
        return {**os.environ, "LD_PRELOAD": str(library), ENVIRONMENT: str(self.path)}

    def begin(self, root: str, rules: Sequence[Rule]) -> None:
        """Forget what was, and let these rules hold under a folder."""
        assert len(rules) <= RULES
        assert len(root) < PATH_BYTES
        ctypes.memset(ctypes.addressof(self._block), 0, ctypes.sizeof(_Block))
        self._block.root = root.encode()
        for slot, rule in zip(self._block.rules, rules, strict=False):
            slot.call, slot.component = CALLS.index(rule.call), COMPONENTS.index(rule.component)
            slot.mode, slot.error = MODES.index(rule.mode), rule.error
            slot.countdown, slot.times = rule.after, rule.times
        self._block.enabled = 1

    def arm(self) -> None:
        """Let the rules hold."""
        self._block.enabled = 1

    def calm(self) -> None:
        """Let nothing fail any more."""
        self._block.enabled = 0

    def name_staged(self, name: str) -> None:
        """Say that a file, named without its suffix and from the store's folder on, is a staged one."""
        for slot in self._block.staged:
            if not slot.value:
                slot.value = name.encode()
                return

    def faults(self) -> list[Fault]:
        """What failed so far."""
        log = self._block.log[: min(self._block.faults, LOG)]
        return [
            Fault(
                CALLS[fault.call],
                COMPONENTS[fault.component],
                MODES[fault.mode],
                fault.error,
                fault.process,
                fault.path.decode(errors="replace"),
            )
            for fault in log
            if fault.written
        ]

    def killed(self, process: int) -> bool:
        """Whether a rule ended a process."""
        return any(fault.kills and fault.process == process for fault in self.faults())

    def call_counts(self) -> dict[tuple[str, str], int]:
        """How many calls there were, failed or not."""
        return {
            (call, component): self._block.seen[i][j]
            for i, call in enumerate(CALLS)
            for j, component in enumerate(COMPONENTS)
            if self._block.seen[i][j]
        }
