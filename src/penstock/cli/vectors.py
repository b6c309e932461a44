"""`penstock vector …`: write a vector, and search.

Thread: one.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.app import group
from penstock.cli.formatting import parse_json
from penstock.cli.session import Name, Session, command
from penstock.errors import Invalid, NotFound

vector_group = group("vector", "Vectors, and their neighbours.")

Vector = Annotated[str, typer.Argument(help="a JSON list of numbers: '[0.1, 0.9]'")]


def _vectors(session: Session, name: str) -> Any:
    return session.store.vector(name, create=False)


@command(vector_group)
def upsert(
    session: Session,
    table: Name,
    id: Annotated[str, typer.Argument(help="of the vector")],  # noqa: A002 - it reads well
    vector: Vector,
    attributes: Annotated[str | None, typer.Option(help="""a JSON object: '{"lang": "en"}'""")] = None,
) -> None:
    """Write a vector, durably; it replaces the one with its id."""
    fields = None if attributes is None else parse_json(attributes, "--attributes")
    if fields is not None and not isinstance(fields, dict):
        raise Invalid("--attributes is a JSON object: give '{\"name\": value}'")
    _vectors(session, table).upsert(id, parse_json(vector, "the vector"), fields, durable=True)
    session.out.done("written, and durable", table=table, id=id)


@command(vector_group)
def search(  # noqa: PLR0917 - typer reads the signature
    session: Session,
    table: Name,
    vector: Annotated[str | None, typer.Argument(help="a JSON list of numbers; or give --like")] = None,
    like: Annotated[str | None, typer.Option(help="the id of a vector of the table")] = None,
    k: Annotated[int, typer.Option("-k", help="how many neighbours")] = 10,
    where: Annotated[str | None, typer.Option(help="""attributes, as JSON: '{"year": {">=": 1990}}'""")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="compare with every vector")] = False,
) -> None:
    """Print the nearest vectors, the nearest first."""
    vectors = _vectors(session, table)
    if (vector is None) == (like is None):
        raise Invalid("search for what? Give a vector, or --like with the id of one")
    if like is not None:
        record = vectors.get(like)
        if record is None:
            raise NotFound(f"there is no vector {like} in {table}")
        query: Any = record.vector
    else:
        query = parse_json(vector or "", "the vector")
    condition = None if where is None else parse_json(where, "--where")
    hits = vectors.search(query, k, where=condition, exact=exact)
    if not isinstance(hits, list):
        raise Invalid("the vector is a JSON list of numbers, not of lists: search one at a time")
    session.out.rows(("id", "distance", "attributes"), hits)
