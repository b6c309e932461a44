"""The examples of a unit and of a container start commands that exist, with options that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from penstock.cli.app import commands_below
from penstock.cli.program import app

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"


def words_of(name: str) -> list[str]:
    text = (DEPLOY / name).read_text()
    if name.endswith(".service"):
        (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        return shlex.split(line)[1:]
    (line,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    return [str(word) for word in json.loads(line)]


def unknown(words: list[str]) -> list[str]:
    commands = dict(commands_below(typer.main.get_command(app)))
    options = {option for one in commands[words[0],].params for option in one.opts}
    return [word for word in words if word.startswith("--") and word not in options]


@pytest.mark.parametrize("name", ["penstock.service", "Containerfile"])
def test_the_command_of_an_example_exists(name: str) -> None:
    words = words_of(name)
    assert words[0] == "serve"
    assert unknown(words) == []
    assert unknown([*words, "--nonsense"]) == ["--nonsense"]
