"""Prometheus selectors, as in `cpu{host="a",dc=~"eu.*"}`: parsed into matchers that test label values.

    selector  = metric [ "{" matchers "}" ]  |  "{" matchers "}"
    matcher   = name op text  |  quoted metric
    op        = "=" | "!=" | "=~" | "!~"

A name is a word or a quoted text (`{"my.metric", "my.label"="x"}`). A text is quoted by ", ' (with Go's escapes) or by
backquotes (without escapes). Regular expressions are RE2's, the whole value must match, and `.` matches a line end.
An absent label has the value "", for every matcher. `{}` selects everything.

Thread: immutable values; any.
Invariant: a selector that `parse_selector` accepted is accepted at every replay: deletes are journalled as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import re2

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.series.labels import METRIC, check_name, check_value

SELECTOR_BYTES_MAX = 65_536
REMEMBERED_BYTES_MAX = 1_024  # of a selector that is not parsed again
MATCHERS_MAX = 256
PATTERN_BYTES_MAX = 4_096
EQUAL, NOT_EQUAL, REGEX, NOT_REGEX = "=", "!=", "=~", "!~"
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OPERATOR = re.compile(r"=~|!~|!=|=")
_LITERAL = re.compile(r"[^\\.+*?()|\[\]{}^$]*")
_LITERALS = re.compile(r"[^\\.+*?()\[\]{}^$]*")  # with | between them
_ESCAPE = re.compile(r"\\(?:([abfnrtv\\'\"])|x([0-9a-fA-F]{2})|([0-7]{3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True
_OPTIONS.dot_nl = True


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label."""

    name: str
    operator: str
    value: str
    exact: frozenset[str] | None = field(init=False, compare=False)  # all that its value matches, if they are few
    prefix: str = field(init=False, compare=False)  # of all that its value matches
    _pattern: Any = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        exact: frozenset[str] | None = None
        pattern, prefix = None, ""
        if self.operator in (EQUAL, NOT_EQUAL):
            exact, prefix = frozenset([self.value]), self.value
        else:
            pattern = _compiled(self.value)
            if _LITERALS.fullmatch(self.value):
                exact = frozenset(self.value.split("|"))
            if exact is not None:
                prefix = self.value if len(exact) == 1 else ""
            elif "|" not in self.value:
                literal = _LITERAL.match(self.value)
                assert literal is not None
                end = literal.end()
                # The last character may be optional: "ab?" and "ab*" begin with "a", "ab{0,2}" too.
                optional = self.value[end : end + 1] in ("?", "*", "{")
                prefix = self.value[: max(0, end - 1) if optional else end]
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "_pattern", pattern)

    @property
    def negative(self) -> bool:
        """Whether it accepts what its value does not match."""
        return self.operator in (NOT_EQUAL, NOT_REGEX)

    @property
    def matches_empty(self) -> bool:
        """Whether it accepts series without this label."""
        return self.matches("")

    def matches(self, value: str) -> bool:
        """Whether it accepts a value."""
        if self.exact is not None:
            return (value in self.exact) is not self.negative
        return (self._pattern.fullmatch(value) is not None) is not self.negative

    def test(self, values: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return which values it accepts."""
        if self.exact is not None:
            exact = self.exact
            hits = np.fromiter((value in exact for value in values), np.bool_, len(values))
        else:
            full = self._pattern.fullmatch
            hits = np.fromiter((full(value) is not None for value in values), np.bool_, len(values))
        return ~hits if self.negative else hits

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{_quoted(self.value)}"


def _compiled(pattern: str) -> Any:
    if len(pattern.encode()) > PATTERN_BYTES_MAX:
        raise Invalid(f"a regular expression has at most {PATTERN_BYTES_MAX} bytes, not {len(pattern.encode())}")
    try:
        return re2.compile(pattern, _OPTIONS)  # unchanged: wrapped in (?s:...), a stray ")" would end the group
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else error
        raise Invalid(f"{in_short(pattern)} is not a regular expression of RE2: {reason}") from None


def parse_selector(text: Any) -> tuple[Matcher, ...]:
    """Return the matchers of a selector, the metric's first; `Invalid` says where it is wrong."""
    if not isinstance(text, str):
        raise Invalid(f'a selector is a text such as cpu{{host="a"}}, not {in_short(text)}')
    plain = str.__str__(text)
    try:
        size = len(plain.encode())
    except UnicodeEncodeError:
        raise Invalid(f"the selector {in_short(plain)} holds half of a surrogate pair") from None
    if size > SELECTOR_BYTES_MAX:
        raise Invalid(f"a selector has at most {SELECTOR_BYTES_MAX} bytes, not {size}")
    return _parsed(plain) if size <= REMEMBERED_BYTES_MAX else _Parser(plain).selector()


@lru_cache(256)
def _parsed(text: str) -> tuple[Matcher, ...]:
    return _Parser(text).selector()


def selector_text(matchers: Sequence[Matcher]) -> str:
    """Return a selector that parses into these matchers."""
    return "{" + ",".join(f"{_quoted(m.name)}{m.operator}{_quoted(m.value)}" for m in matchers) + "}"


def _quoted(value: str) -> str:
    plain = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{plain}"'


class _Parser:
    """Reads one selector from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def selector(self) -> tuple[Matcher, ...]:
        self._skip_space()
        matchers: list[Matcher] = []
        word = _WORD.match(self._text, self._at)
        if word is not None:
            self._at = word.end()
            matchers.append(self._matcher(METRIC, EQUAL, word.group()))
            self._skip_space()
        if self._peek() == "{":
            self._at += 1
            self._matchers(matchers, named=word is not None)
        elif word is None:
            self._refuse("a metric or {")
        self._skip_space()
        if self._at < len(self._text):
            self._refuse("the end (ranges, functions and operators are PromQL: use query or query_range)")
        return tuple(matchers)

    def _matchers(self, matchers: list[Matcher], *, named: bool) -> None:
        self._skip_space()
        while self._peek() != "}":
            if len(matchers) == MATCHERS_MAX:
                raise Invalid(f"a selector has at most {MATCHERS_MAX} matchers")
            begin = self._at
            matchers.append(self._one())
            if matchers[-1].name == METRIC and matchers[-1].operator == EQUAL:
                if named:
                    self._at = begin
                    raise Invalid(f"the selector {in_short(self._text)} names its metric twice: name it once")
                named = True
            self._skip_space()
            if self._peek() == ",":
                self._at += 1
                self._skip_space()
            elif self._peek() != "}":
                self._refuse(", or }")
        self._at += 1

    def _one(self) -> Matcher:
        if self._peek() in ("'", '"', "`"):
            name = self._quoted()
            self._skip_space()
            operator = _OPERATOR.match(self._text, self._at)
            if operator is None:  # a quoted metric
                return self._matcher(METRIC, EQUAL, name)
        else:
            word = _WORD.match(self._text, self._at)
            if word is None or ":" in word.group():
                self._refuse("a label or }")
            name, self._at = word.group(), word.end()
            self._skip_space()
            operator = _OPERATOR.match(self._text, self._at)
            if operator is None:
                self._refuse("=, !=, =~ or !~")
        self._at = operator.end()
        self._skip_space()
        return self._matcher(name, operator.group(), self._quoted())

    def _matcher(self, name: str, operator: str, value: str) -> Matcher:
        check_name(name)
        if operator in (EQUAL, NOT_EQUAL):
            check_value(name, value)
        return Matcher(name, operator, value)

    def _quoted(self) -> str:
        quote = self._peek()
        if quote not in ("'", '"', "`") or not quote:
            self._refuse("a quoted text")
        begin = self._at + 1
        if quote == "`":
            end = self._text.find("`", begin)
            if end < 0:
                self._refuse("a closing `")
            self._at = end + 1
            return self._text[begin:end]
        parts: list[str] = []
        self._at = begin
        while (character := self._peek()) != quote:
            if not character or character == "\n":
                self._refuse(f"a closing {quote}")
            if character == "\\":
                parts.append(self._escape())
            else:
                parts.append(character)
                self._at += 1
        self._at += 1
        return "".join(parts)

    def _escape(self) -> str:
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None:
            self._refuse("an escape such as \\n, \\\\ or \\u00e9")
        simple, *codes = escape.groups()
        if simple:
            character = _SIMPLE.get(simple, simple)
        else:
            octal = codes[1]
            number = int(octal, 8) if octal else int(next(code for code in codes if code), 16)
            byte_sized = bool(codes[0] or octal)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000 or (byte_sized and number > 0x7F):
                self._refuse("the number of a character: write others as they are")
            character = chr(number)
        self._at = escape.end()
        return character

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _refuse(self, expected: str) -> NoReturn:
        position = f"character {self._at + 1}" if self._at < len(self._text) else "the end"
        raise Invalid(f"the selector {in_short(self._text)} is wrong at {position}: expected {expected}")
