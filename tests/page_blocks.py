"""The code blocks of a page, run in order from top to bottom, as a reader who types them in would.

Nothing is there before the first block: no store, no name. `/abs/` stands for the folder of the test, and the host
`db.example` for this machine. Of shell blocks, the lines that call `penstock` run, those that run until Ctrl-C or end
in `&` in the background. `TOKEN` stands for the one that a command printed, and a port of 127.0.0.1 for a free one. A
TOML block is the file of tokens.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from owner_processes import owners

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md", DOCS / "tutorial.md", *sorted((DOCS / "guide").glob("*.md"))]
SERVED = "db.example:7878"
UNTIL_CTRL_C = ("top", "console")  # commands that run in the background although they do not end in `&`
RUN_S = 120.0


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    line: int  # the first of its source
    source: str


def blocks(page: Path, language: str = "") -> Iterator[Block]:
    """The fenced blocks of a page, of one language or of all."""
    text = page.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] and language in ("", match[1]):
            yield Block(match[1], text.count("\n", 0, match.start(2)) + 1, match[2])


class PageRun:
    """Runs the blocks of one page, in one namespace."""

    def __init__(self, page: Path, folder: Path, substitutes: Mapping[str, str] | None = None) -> None:
        self.page = page
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.ran: list[Block] = []
        self._folder = folder
        self._substitutes = {**(substitutes or {}), "/abs/": f"{folder}/"}
        self._servers: list[subprocess.Popen[Any]] = []
        self._ports: dict[str, int] = {}

    def run(self) -> None:
        """Run every block; a failure names the page and the line."""
        for block in blocks(self.page):
            act = {"python": self._python, "sh": self._shell, "console": self._shell, "toml": self._toml}
            if block.language in act:
                act[block.language](block)

    def _fitted(self, text: str) -> str:
        for old, new in self._substitutes.items():
            text = text.replace(old, new)
        text = re.sub(r"127\.0\.0\.1:(7\d{3})", lambda match: f"127.0.0.1:{self._port(match[1])}", text)
        return text.replace("db.example", "localhost")

    def _port(self, written: str) -> int:
        """A free port for the one that a page names; the one after it is free, too."""
        if written not in self._ports:
            for port in range(22_000 + os.getpid() * 16 % 20_000 + 4 * len(self._ports), 65_000, 64):
                with suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
                    self._ports[written] = port
                    break
        return self._ports[written]

    def _python(self, block: Block) -> None:
        source = "\n" * (block.line - 1) + self._fitted(block.source)  # so that a traceback has the page's lines
        exec(compile(source, str(self.page), "exec"), self.names)
        self.ran.append(block)

    def _toml(self, block: Block) -> None:
        (self._folder / "tokens.toml").write_text(block.source)

    def _shell(self, block: Block) -> None:
        for line in block.source.splitlines():
            words = shlex.split(self._fitted(line.removeprefix("$ ")), comments=True)
            if words[:1] != ["penstock"]:
                continue
            command = [sys.executable, "-m", "penstock", *words[1:]]
            if words[1] == "serve":
                self._serve(command)
            elif words[-1] == "&" or words[1] in UNTIL_CTRL_C or "--follow" in words:
                command = [word for word in command if word != "&"]
                self._servers.append(subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL))
            else:
                ran = subprocess.run(
                    command, cwd=self._folder, capture_output=True, text=True, timeout=RUN_S, check=False
                )
                assert ran.returncode == 0, f"{self.page.name}:{block.line} {line}: {ran.stderr}"
                if ran.stdout.startswith("token="):
                    self._substitutes["TOKEN"] = ran.stdout.strip().removeprefix("token=")
            self.ran.append(block)

    def _serve(self, command: list[str]) -> None:
        command[command.index("--host") + 1], command[command.index("--port") + 1] = "localhost", "0"
        server = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.PIPE, text=True)
        self._servers.append(server)
        assert server.stdout is not None
        self._substitutes[SERVED] = server.stdout.readline().strip().removeprefix("penstock://")

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Close what the page left open."""
        for value in list(self.names.values()):
            if type(value).__name__ in ("Store", "RemoteStore"):
                value.close()
        for folder in {path.parent for path in self._folder.glob("*/STORE")}:
            for owner in owners(folder):  # that a connection started
                os.kill(owner, signal.SIGKILL)
        for server in self._servers:
            server.terminate()
            server.wait(RUN_S)
            if server.stdout is not None:
                server.stdout.close()
        for name in ("PENSTOCK_TOKEN", "PENSTOCK_AUTHORITY"):
            os.environ.pop(name, None)


def needs_spark(page: Path) -> bool:
    """Whether a page's blocks need a Spark session: then tests/spark runs it."""
    return any("spark" in block.source for block in blocks(page, "python"))
