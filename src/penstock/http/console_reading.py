"""What the console's screens read of tables: rows, messages, dead letters, vectors, cardinality.

Thread: any; every function blocks, and reads a bounded number of rows.
Invariants: (1) bytes are sent as base64, with their whole length, and never as markup: the page decides how to show
them. (2) a filter reads at most SCANNED_MAX rows and says where it stopped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from penstock.errors import Invalid, NotFound, PenstockError
from penstock.kinds import numbers_of, statistics_of

Reply: TypeAlias = dict[str, Any]
ROWS_MAX = 200  # of one answer
SCANNED_MAX = 20_000  # rows that a filter reads
PREVIEW_BYTES = 2_048  # of a value in a list
VALUE_BYTES_MAX = 4 << 20  # of a value that is shown alone
NEIGHBOURS_MAX = 100
MAP_MAX = 400  # vectors of a projection
RECALL_QUERIES = 16
LETTERS_EACH = 1_000  # that share a producer of tokens: the ledger remembers a little more of them


class Parameters:
    """The parameters of a request, checked."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; `Invalid` if it is absent and has no default."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or len(value) > 1 << 20:
            raise Invalid(f"the request needs {name}, a text")
        return value

    def number(self, name: str, default: int, low: int = 0, high: int = 1 << 62) -> int:
        """Return a whole number within bounds."""
        value = self._values.get(name, default)
        try:
            if type(value) not in (int, str):  # a fraction, a bool or null of a JSON document is not a whole number
                raise ValueError
            number = default if value == "" else int(value)
        except ValueError:
            raise Invalid(f"{name} is a whole number, not {str(value)[:40]!r}") from None
        if not low <= number <= high:
            raise Invalid(f"{name} is {low} to {high}, not {number}")
        return number

    def data(self, name: str) -> bytes:
        """Return bytes, given in hexadecimal digits."""
        text = self.text(name, "")
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise Invalid(f"{name} is given in hexadecimal digits") from None

    def flag(self, name: str) -> bool:
        return self._values.get(name) in ("1", "true", True)


def encoded(value: Any, bytes_max: int = PREVIEW_BYTES) -> Reply:
    """Return a value for a page: its type, its first bytes as base64, and how many there are."""
    kind, data = _content(value)
    return {"type": kind, "size": len(data), "data": base64.b64encode(data[:bytes_max]).decode()}


def _content(value: Any) -> tuple[str, bytes]:
    """Return the type of a value, and its bytes."""
    if isinstance(value, bytes):
        return "bytes", value
    if isinstance(value, str):
        return "text", value.encode()
    return "json", msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value.hex() if isinstance(value, (bytes, bytearray)) else str(value)


# -- kv


def _key(table: Any, data: bytes) -> Any:
    """Return a key as the table has it: bytes, or text."""
    if not _has_text_keys(table):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Invalid("the keys of this table are text, and this is not UTF-8") from None


def _has_text_keys(table: Any) -> bool:
    return type(table).__name__.startswith("Text")


def _bytes(key: Any) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def read_rows(table: Any, parameters: Parameters) -> Reply:
    """Return rows of a kv table: by prefix, from a key, forwards or backwards, and that contain a text."""
    limit, backwards = parameters.number("limit", 50, 1, ROWS_MAX), parameters.flag("reverse")
    prefix, needle, after = (
        parameters.data("prefix"),
        parameters.text("contains", "").encode(),
        parameters.data("after"),
    )
    bound: dict[str, Any] = {"prefix": _key(table, prefix)} if prefix else {}
    if after and backwards:
        bound["end"] = _key(table, after)
    elif after:
        bound["start"] = _key(table, after)
    rows: list[Reply] = []
    scanned, last, more = 0, b"", False
    for key, value in table.scan(**bound, reverse=backwards, limit=SCANNED_MAX + 2):  # `after`, and whether more follow
        if after and not backwards and _bytes(key) == after:
            continue
        if len(rows) == limit or scanned == SCANNED_MAX:
            more = True
            break
        scanned, last = scanned + 1, _bytes(key)
        if not needle or needle in last or needle in _content(value)[1]:
            rows.append({"key": last.hex(), "value": encoded(value)})
    return {"rows": rows, "scanned": scanned, "next": last.hex() if more else None}


def read_row(table: Any, parameters: Parameters) -> Reply:
    """Return one row, whole."""
    key = parameters.data("key")
    row = table.get_row(_key(table, key))
    if row is None:
        raise NotFound("there is no such key")
    return {"key": key.hex(), "value": encoded(row.value, VALUE_BYTES_MAX), "lsn": row.lsn}


def delete_row(table: Any, parameters: Parameters) -> Reply:
    """Delete a row, durably."""
    table.delete(_key(table, parameters.data("key")), durable=True)
    return {"done": "deleted, and durable"}


# -- queues


def _message(message: Any, bytes_max: int = PREVIEW_BYTES) -> Reply:
    return {
        "shard": message.shard,
        "sequence": message.sequence,
        "time": message.time_us / 1e6,
        "key": None if message.key is None else message.key.hex(),
        "payload": encoded(message.payload, bytes_max),
        "headers": {name: encoded(value) for name, value in (message.headers or {}).items()},
    }


def read_messages(table: Any, parameters: Parameters) -> Reply:
    """Return messages of a shard from a sequence on, or its last ones; those that contain a text."""
    shard, limit = parameters.number("shard", 0, 0, table.shards - 1), parameters.number("limit", 50, 1, ROWS_MAX)
    bounds = table.bounds()[shard]
    start = parameters.number("from", 0) or max(bounds.first, bounds.next - limit)
    needle = parameters.text("contains", "").encode()
    at, scanned = max(start, bounds.first), 0
    rows: list[Reply] = []
    while at < bounds.next and len(rows) < limit and scanned < SCANNED_MAX:
        messages = table.read(shard, at, min(1_000, limit) if not needle else 1_000)
        if not messages:
            break
        for message in messages:
            if len(rows) == limit or scanned == SCANNED_MAX:
                break
            scanned, at = scanned + 1, message.sequence + 1
            if not needle or needle in message.payload or needle in (message.key or b""):
                rows.append(_message(message))
    more = at < bounds.next
    return {"rows": rows, "first": bounds.first, "end": bounds.next, "scanned": scanned, "next": at if more else None}


def read_message(table: Any, parameters: Parameters) -> Reply:
    """Return one message, whole."""
    shard, sequence = parameters.number("shard", 0, 0, table.shards - 1), parameters.number("sequence", 1, 1)
    messages = table.read(shard, sequence, 1)
    if not messages or messages[0].sequence != sequence:
        raise NotFound(f"there is no message {sequence} in shard {shard}")
    return _message(messages[0], VALUE_BYTES_MAX)


# -- dead letters


def _letter(payload: bytes) -> Reply | None:
    """Return the contents of a dead letter; None if the message is not one."""
    if not payload.startswith(b"{"):
        return None
    try:
        fields = msgspec.json.decode(payload)
        data = base64.b64decode(fields["payload_base64"])
        return {"source": str(fields["source"]), "reason": str(fields["reason"]), "data": data, "fields": fields}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def read_letters(store: Any, table: Any, parameters: Parameters) -> Reply:
    """Return the newest dead letters of a queue, each with its reason; none if it holds messages of another kind."""
    limit, letters, total = parameters.number("limit", 50, 1, ROWS_MAX), list[Reply](), 0
    for shard, bounds in enumerate(table.bounds()):
        total += bounds.next - bounds.first
        for message in table.read(shard, max(bounds.first, bounds.next - limit), limit) if bounds.next > 1 else []:
            letter = _letter(message.payload)
            if letter is not None:
                at = letter["fields"]
                letters.append(
                    {
                        "shard": shard,
                        "sequence": message.sequence,
                        "time": message.time_us / 1e6,
                        "source": letter["source"],
                        "reason": letter["reason"],
                        "from": {name: at.get(name) for name in ("shard", "sequence")},
                        "payload": encoded(letter["data"]),
                    }
                )
    letters.sort(key=lambda entry: entry["time"], reverse=True)
    return {"letters": letters[:limit], "total": total}


def letter_source(table: Any, parameters: Parameters) -> str:
    """Return the table that a dead letter came from."""
    return _existing_letter(table, parameters)[1]["source"]  # type: ignore[no-any-return]


def put_back(store: Any, table: Any, parameters: Parameters) -> Reply:
    """Put the message of a dead letter back into the queue it came from: once, however often it is called."""
    message, letter = _existing_letter(table, parameters)
    info = store.port.table(table.name)
    if info is None:
        raise NotFound(f"table {table.name} was dropped")
    # By id, as another table of this name has other letters; in ranges, as an old letter may come after a new one.
    part, number = divmod(message.sequence, LETTERS_EACH)
    token = f"console put back {info.table_id} {message.shard} {part}", number
    with store.batch(token=token) as batch:
        batch.queue(letter["source"]).put(letter["data"], key=message.key)
    if batch.duplicate:
        return {"done": "it was put back before: nothing was changed"}
    return {"done": f"put back into {letter['source']}, and durable"}


def _existing_letter(table: Any, parameters: Parameters) -> tuple[Any, Reply]:
    shard, sequence = parameters.number("shard", 0, 0, table.shards - 1), parameters.number("sequence", 0, 1)
    messages = table.read(shard, sequence, 1)
    letter = _letter(messages[0].payload) if messages and messages[0].sequence == sequence else None
    if letter is None:
        raise NotFound(f"message {sequence} of shard {shard} is not a dead letter")
    return messages[0], letter


# -- series


def read_cardinality(table: Any, parameters: Parameters) -> Reply:
    """Return how many series each metric has, and how many values each label."""
    top = parameters.number("top", 50, 1, 500)
    cardinality = table.cardinality(top=top)
    labels = sorted(cardinality.labels.items(), key=lambda pair: -pair[1])
    metrics = sorted(cardinality.metrics.items(), key=lambda pair: -pair[1])
    reply: Reply = {"series": cardinality.series, "metrics": metrics, "labels": labels}
    label = parameters.text("label", "")
    if label:
        values = table.label_values(label)
        reply |= {"values": values[:top], "values_total": len(values)}
    return reply


# -- vectors


def read_neighbours(table: Any, parameters: Parameters) -> Reply:
    """Return the neighbours of a vector with a map of them among others, and how many an exact search also finds."""
    k = parameters.number("k", 10, 1, NEIGHBOURS_MAX)
    numbers = table.statistics()
    about = {
        "count": numbers.count, "dimensions": table.dimensions, "metric": table.metric, "trained": numbers.trained,
        "lists": numbers.lists, "probes": numbers.probes, "recall": numbers.recall,
        "recall_queries": numbers.recall_queries,
    }  # fmt: skip
    ids, vectors = _sampled(table)
    if not ids:
        return {"about": about, "hits": [], "map": [], "query": None}
    like, query = _query(table, parameters, ids, vectors)
    hits = table.search(query, k)
    exact = [hit.id for hit in table.search(query, k, exact=True)]
    points = _projected(table, ids, vectors, hits, query)
    return {
        "about": about,
        "query": like,
        "hits": [{"id": hit.id, "distance": hit.distance, "attributes": encoded(dict(hit.attributes))} for hit in hits],
        "exact": exact,
        "found": len({hit.id for hit in hits} & set(exact)),
        "map": points,
    }


def _query(table: Any, parameters: Parameters, ids: list[str], vectors: Any) -> tuple[str | None, Any]:
    text = parameters.text("vector", "")
    if text:
        try:
            with np.errstate(all="ignore"):  # infinity is refused by the search
                return None, np.asarray(msgspec.json.decode(text, type=list[float]), np.float32)
        except msgspec.DecodeError as error:
            raise Invalid(f"the vector is a JSON list of numbers ({error})") from None
    like = parameters.text("like", "") or ids[0]
    record = table.get(like)
    if record is None:
        raise NotFound(f"there is no vector {like}")
    return like, np.asarray(record.vector, np.float32)


def _sampled(table: Any) -> tuple[list[str], Any]:
    """Return the first vectors of a table, up to MAP_MAX."""
    ids: list[str] = []
    parts: list[Any] = []
    batches = table.scan_arrow()
    for batch in batches:
        rows = min(batch.num_rows, MAP_MAX - len(ids))
        ids += batch.column("id").slice(0, rows).to_pylist()
        column = batch.column("vector").slice(0, rows)
        parts.append(np.asarray(column.flatten(), np.float32).reshape(rows, -1))
        if len(ids) >= MAP_MAX:
            break
    return ids, np.concatenate(parts) if parts else np.zeros((0, 1), np.float32)


def _projected(table: Any, ids: list[str], vectors: Any, hits: Any, query: Any) -> list[Reply]:
    """Return a map: sampled vectors, neighbours and the query, on the two axes along which they differ most."""
    sampled_ids = set(ids)
    extra = [(hit.id, record.vector) for hit in hits if hit.id not in sampled_ids and (record := table.get(hit.id))]
    if extra:
        ids = [*ids, *(name for name, _ in extra)]
        vectors = np.concatenate([vectors, np.asarray([vector for _, vector in extra], np.float32)])
    matrix = np.concatenate([vectors, query.reshape(1, -1)]).astype(np.float64)
    if table.metric == "cosine":
        matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
    matrix -= matrix.mean(axis=0)
    axes = np.linalg.svd(matrix, full_matrices=False)[2]  # not from their products: 16,384 dimensions have 2 GB of them
    flat = matrix @ axes[:2].T
    if flat.shape[1] < 2:
        flat = np.concatenate([flat, np.zeros((len(flat), 1))], axis=1)
    flat /= np.maximum(np.quantile(np.abs(flat), 0.98, axis=0), 1e-12)  # a few far ones stand at the edge
    flat = np.clip(flat, -1.05, 1.05)
    nearest = {hit.id: number for number, hit in enumerate(hits)}
    rounded = np.round(flat, 4).tolist()
    points: list[Reply] = [
        {"id": name, "at": at, "rank": nearest.get(name)} for name, at in zip(ids, rounded, strict=False)
    ]
    return [*points, {"id": None, "at": rounded[-1], "rank": -1}]


def check_recall(table: Any, parameters: Parameters) -> Reply:
    """Search with the index and exactly; return what share of the neighbours the index found."""
    k = parameters.number("k", 10, 1, NEIGHBOURS_MAX)
    ids, vectors = _sampled(table)
    if not ids:
        raise NotFound("the table has no vectors yet")
    step = max(1, len(ids) // RECALL_QUERIES)
    hits = neighbours = 0
    for query in vectors[::step][:RECALL_QUERIES]:
        exact = {hit.id for hit in table.search(query, k, exact=True)}
        hits += len(exact & {hit.id for hit in table.search(query, k)})
        neighbours += len(exact)
    return {
        "recall": hits / neighbours if neighbours else 1.0,
        "queries": len(vectors[::step][:RECALL_QUERIES]),
        "k": k,
    }


# -- tables


def describe(store: Any, table: Any, info: Any) -> Reply:
    """Return what is known about a table: its columns, its numbers, its shards, its files by level."""
    plain = numbers_of(statistics_of(table))
    levels: dict[int, Reply] = {}
    try:
        chunks = store.chunks(info.name)
    except PenstockError:
        chunks = []
    for chunk in chunks:
        level = levels.setdefault(chunk.level, {"level": chunk.level, "files": 0, "rows": 0, "bytes": 0})
        level["files"] += 1
        level["rows"] += chunk.rows
        level["bytes"] += chunk.size_bytes
    shards = [
        {name: getattr(partition, name) for name in partition.__dataclass_fields__}
        for partition in store.statistics().partitions
        if partition.table == info.name
    ]
    value = getattr(table, "value_type", None)
    return {
        "name": info.name,
        "kind": info.kind,
        "shards": info.shards,
        "columns": [{"name": field.name, "type": str(field.type)} for field in table.schema],
        "value": value if isinstance(value, str) else None if value is None else type(value).__name__,
        "numbers": {name: number for name, number in plain.items() if isinstance(number, (int, float, str, bool))},
        "partitions": shards,
        "levels": [levels[level] for level in sorted(levels)],
    }
