"""A command's session: the store it is about, and its output. `command` gives every command the same options.

A store is reached by `penstock.connect`, so a command works on a store that another process has open, that is served
over TCP, or that nobody has open (then an owner is started, which ends by itself).

Thread: one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

import penstock
from penstock.cli.output import Output
from penstock.client.certificates import SCHEME
from penstock.errors import Invalid, NotFound

Command = TypeVar("Command", bound=Callable[..., None])

Name = Annotated[str, typer.Argument(help="a table")]
Limit = Annotated[
    int | None,
    typer.Option(min=0, max=1 << 40, help="the most rows to print; 0: all. Default: 20 at a terminal, else all"),
]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]


class Session:
    """One command on one store."""

    def __init__(
        self, address: str, out: Output, *, token: str | None, authority: Path | None, timeout_s: float
    ) -> None:
        self.address = address
        self.out = out
        self.create = False  # the store, if there is none
        self.token = token
        self._authority = authority
        self._timeout_s = timeout_s
        self._ends = ExitStack()

    @property
    def folder(self) -> Path:
        """The folder of the store; `Invalid` if an address was given."""
        if self.address.startswith(SCHEME):
            raise Invalid(f"this command works on a folder, not on {self.address}: run it where the store is")
        return Path(self.address)

    @cached_property
    def store(self) -> penstock.RemoteStore:
        """The store, connected at the first use."""
        served = self.address.startswith(SCHEME)
        try:
            connection = penstock.connect(
                self.address,
                create=self.create,
                timeout_s=self._timeout_s,
                token=self.token if served else None,
                authority=self._authority if served else None,
            )
        except NotFound as error:
            if served or (self.folder / "STORE").exists():
                raise
            if self.folder.is_file():
                raise Invalid(f"{self.address} is a file, not the folder of a store: give another path") from None
            raise NotFound(f"there is no store in {self.address}: give another path, or see penstock init") from error
        return self._ends.enter_context(connection)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something is deleted; end the command if the answer is no, or if there is no one to ask."""
        if not yes:
            typer.confirm(question, abort=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()


_STORE = (
    "store",
    Annotated[str, typer.Argument(help="the store's folder, or penstock://host:port", show_default=False)],
)
_COMMON: tuple[tuple[str, Any, Any], ...] = (
    ("token", Annotated[str | None, typer.Option(envvar="PENSTOCK_TOKEN", help="for penstock://")], None),
    (
        "authority",
        Annotated[
            Path | None,
            typer.Option(envvar="PENSTOCK_AUTHORITY", help="for penstock://: PEM file that signed its certificate"),
        ],
        None,
    ),
    ("timeout_s", Annotated[float, typer.Option(envvar="PENSTOCK_TIMEOUT_S", help="to wait for an answer")], 30.0),
    (
        "json",
        Annotated[bool, typer.Option("--json", envvar="PENSTOCK_JSON", help="print JSON, an object a line")],
        False,
    ),
)


def command(group: typer.Typer, name: str | None = None, *, numbers: bool = False) -> Callable[[Command], Command]:
    """Register a function as a command on a store; its first argument is the session, the others are its own.

    `numbers`: its arguments may begin with a minus sign.

    Typer reads signatures, so the one that it gets is put together here: STORE, the function's own arguments, and the
    options that every command has.
    """

    def register(function: Command) -> Command:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        store = inspect.Parameter(_STORE[0], keyword, annotation=_STORE[1])
        common = [inspect.Parameter(each, keyword, annotation=note, default=default) for each, note, default in _COMMON]
        parameters = [store, *(parameter.replace(kind=keyword) for parameter in own), *common]

        def run(**arguments: Any) -> None:
            out = Output(json=arguments.pop("json"))
            session = Session(
                arguments.pop("store"),
                out,
                token=arguments.pop("token"),
                authority=arguments.pop("authority"),
                timeout_s=arguments.pop("timeout_s"),
            )
            with session:
                function(session, **arguments)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        group.command(name, context_settings={"ignore_unknown_options": numbers})(run)
        return function

    return register
