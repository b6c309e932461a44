"""The program `penstock`: its groups of commands, the options common to all, and where options get their values.

An option's value is, weakest first: its default; `penstock.toml` in the current folder (or the file that
PENSTOCK_CONFIG names); its environment variable; the command line.

    token = "…"            # for every command that has the option --token
    timeout_s = 20

    [serve]                # for `penstock serve`
    port = 7400

    [queue.tail]           # for `penstock queue tail`
    limit = 100

Thread: one.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.logs import LogFormat, LogLevel, start_logging
from penstock.errors import Invalid

CONFIG_FILE = "penstock.toml"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
PREFIX = "PENSTOCK"  # of environment variables

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]},
)


def group(name: str, text: str) -> typer.Typer:
    """Add a group of commands: `penstock NAME COMMAND`."""
    commands = typer.Typer(no_args_is_help=True, help=text, rich_markup_mode=None)
    app.add_typer(commands, name=name)
    return commands


def _print_version(requested: bool) -> None:
    if requested:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="print the traceback of an error")] = False,
    log_level: Annotated[LogLevel, typer.Option(help="what to log, to stderr")] = LogLevel.warning,
    log_format: Annotated[LogFormat, typer.Option(help="of the log")] = LogFormat.text,
    _version: Annotated[
        bool,
        typer.Option(  # never from PENSTOCK_VERSION, which deployments set to what they install
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,
            show_envvar=False,
            help="print the version and exit",
        ),
    ] = False,
) -> None:
    """A Penstock store: look at it, change it, serve it. STORE is a folder or penstock://host:port."""
    context.obj = {"debug": debug}
    start_logging(log_level, log_format)
    context.default_map = defaults_of(context.command, read_config())


# -- the configuration file


def config_path() -> Path:
    """Return the path of the configuration file, which may not exist."""
    return Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_FILE)


def read_config() -> dict[str, Any]:
    """Read the configuration file; it may be absent, unless the environment names it."""
    path = config_path()
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        if os.environ.get(CONFIG_VARIABLE):
            raise Invalid(
                f"{CONFIG_VARIABLE} names {path}, which does not exist: create it, or unset the variable"
            ) from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Invalid(f"{path} cannot be read ({error}): correct or remove it") from None


def commands_below(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command of a group with its path: (("queue", "tail"), command)."""
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if hasattr(below, "commands"):
            yield from commands_below(below, (*path, name))
        else:
            yield (*path, name), below


def option_names(command: Any) -> list[str]:
    """Return the names of a command's options, as the configuration file has them."""
    return [param.name for param in command.params if param.param_type_name == "option" and param.name != "help"]


def defaults_of(root: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as a tree of defaults by command; `Invalid` if it names what does not exist."""
    common = {name: _plain(value) for name, value in config.items() if not isinstance(value, dict)}
    names = {name for _, command in commands_below(root) for name in option_names(command)}
    if unknown := sorted(set(common) - names):
        raise Invalid(f"{config_path()}: no command has an option {unknown[0]}: see penstock --help")
    return _defaults_below(
        root, {name: section for name, section in config.items() if isinstance(section, dict)}, common, ()
    )


def _defaults_below(
    command: Any, config: dict[str, Any], common: dict[str, Any], path: tuple[str, ...]
) -> dict[str, Any]:
    below = getattr(command, "commands", None)
    names = option_names(command) if below is None else list(below)
    for name in config:
        if name not in names:
            raise Invalid(
                f"{config_path()}: [{'.'.join(path)}] has no {name}: use one of {', '.join(sorted(names))}"
                if path
                else f"{config_path()}: there is no command {name}: see penstock --help"
            )
    if below is None:
        return {name: common[name] for name in names if name in common} | {
            n: _plain(value) for n, value in config.items()
        }
    for name, value in config.items():
        if not isinstance(value, dict):
            raise Invalid(f"{config_path()}: {name} of [{'.'.join(path)}] is a section of its own")
    return {name: _defaults_below(child, config.get(name, {}), common, (*path, name)) for name, child in below.items()}


def _plain(value: Any) -> Any:
    return (
        [str(item) for item in value] if isinstance(value, list) else value if isinstance(value, bool) else str(value)
    )
