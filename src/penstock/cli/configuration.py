"""`penstock config show`: the value of every option, and where it comes from.

Thread: one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.app import PREFIX, commands_below, config_path, defaults_of, group, read_config
from penstock.cli.maintenance import Json
from penstock.cli.output import Output

config_group = group("config", "Where options get their values from.")

SECRETS = {"token"}


@config_group.command("show")
def show(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="also options that have their default")] = False,
    json: Json = False,
) -> None:
    """Print the options that penstock.toml or the environment sets; with --all, every option."""
    root: Any = context.find_root().command
    tree = defaults_of(root, read_config())
    rows = [row for row in _values(root, tree) if everything or row[3] != "default"]
    none = f"neither {config_path()} nor the environment sets an option: --all prints the defaults"
    Output(json=json).rows(("command", "option", "value", "from"), rows, none=none)


def _values(root: Any, tree: dict[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    for path, command in commands_below(root):
        section: Any = tree
        for name in path:
            section = section.get(name, {})
        for option in command.params:
            if option.param_type_name != "option" or option.name == "help" or option.hidden:
                continue
            value, source = _value(option, path, section)
            printable = "(set)" if option.name in SECRETS and value is not None else value
            yield " ".join(path), option.name, printable, source


def _value(option: Any, path: tuple[str, ...], section: dict[str, Any]) -> tuple[Any, str]:
    named = option.envvar or "_".join((PREFIX, *path, option.name)).upper().replace("-", "_")
    for variable in [named] if isinstance(named, str) else named:
        if os.environ.get(variable):
            return os.environ[variable], f"${variable}"
    if option.name in section:
        return section[option.name], str(config_path())
    return None if callable(option.default) else option.default, "default"
