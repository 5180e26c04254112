"""One line of a task file: its fields, or what is wrong with it and the mend."""

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_LINE_BYTES = 15_000_000  # a MongoDB document ends at 16 MiB
_MAX_DEPTH = 80  # MongoDB refuses documents nested deeper than 100
_INT64 = 1 << 63
_DATA_IMAGE = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class LineProblem(BaseModel):
    """What is wrong with one line; `field` is empty when the line as a whole is."""

    line: int
    field: str
    what: str
    mend: str

    def __str__(self) -> str:
        place = f"line {self.line}" + (f", {self.field}" if self.field else "")
        return f"{place}: {self.what}; mend: {self.mend}"


class BadLine(Exception):
    """Raised within this module's checks; `parse_line` turns it into a LineProblem."""

    def __init__(self, field: str, what: str, mend: str) -> None:
        self.field, self.what, self.mend = field, what, mend
        super().__init__(what)


class ParsedLine(BaseModel):
    """The fields of a good line. `key` is the line's id, None when it has none."""

    key: str | None
    query: str
    messages: list[dict[str, Any]] | None
    answer: str | None
    scorer: str | None
    demonstration: str | None
    images: list[str]
    extra: dict[str, Any]

    def canonical(self) -> str:
        """What the task's id is made of: equal content, equal text."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def parse_line(raw: bytes, line: int, known_scorer: Callable[[str], str | None]) -> ParsedLine | LineProblem | None:
    """The fields of one line, or its first problem, or None for a blank line.

    `known_scorer` gives None for a scorer that exists, else the names that do.
    """
    try:
        text = _decoded(raw)
        return _fields(_loaded(text), known_scorer) if text.strip() else None
    except BadLine as problem:
        return LineProblem(line=line, field=problem.field, what=problem.what, mend=problem.mend)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine("", f"byte {error.start + 1} is not UTF-8", "save the file as UTF-8") from None


def _loaded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_double_names)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at column {error.colno}"
        raise BadLine("", what, "write one JSON object on the line") from None
    except RecursionError:
        raise BadLine("", "nested too deeply", f"nest at most {_MAX_DEPTH} levels") from None
    except ValueError:  # more digits than int() takes
        raise BadLine("", "holds an integer of too many digits", "write it as a string") from None
    if not isinstance(value, dict):
        raise BadLine("", f"a JSON {_kind(value)}, not an object", 'write an object such as {"query": "..."}')
    for name, item in value.items():
        if not name or "\0" in name:
            raise BadLine(repr(name), "a field's name is empty or holds a NUL", "rename the field")
        _check_value(name, name, 0)
        _check_value(name, item, 0)
    return value


def _without_double_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise BadLine(double, "is given twice", "keep one of the two")
    return value


def _check_value(field: str, value: Any, depth: int) -> None:
    """What Python's JSON reader lets pass and JSON or the database do not."""
    if depth > _MAX_DEPTH:
        raise BadLine(field, "nested too deeply", f"nest at most {_MAX_DEPTH} levels")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            what = "holds half of a surrogate pair, which is no character"
            raise BadLine(field, what, "write the whole character, or leave it out") from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadLine(field, "holds NaN, Infinity or a number beyond range", "write a finite number, a string or null")
    elif isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise BadLine(field, "holds an integer beyond 64 bits", "write it as a string")
    elif isinstance(value, list):
        for item in value:
            _check_value(field, item, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not name or "\0" in name:
                raise BadLine(field, "a name in it is empty or holds a NUL", "rename it")
            _check_value(f"{field}.{name}", name, depth)
            _check_value(f"{field}.{name}", item, depth + 1)


def _fields(value: dict[str, Any], known_scorer: Callable[[str], str | None]) -> ParsedLine:
    messages = _messages(value.get("messages"))
    query = _text(value, "query") or ""
    asks = query.strip() or any(message["role"] == "user" for message in messages or [])
    if not asks:
        raise BadLine("query", "no query and no user message", 'add "query", or a message with role "user"')
    known = {"id", "query", "messages", "answer", "scorer", "demonstration", "images", "extra"}
    extra = value.get("extra") if value.get("extra") is not None else {}
    if not isinstance(extra, dict):
        raise BadLine("extra", f"is a {_kind(extra)}, not an object", "write an object, or leave it out")
    others = {name: item for name, item in value.items() if name not in known}
    if double := sorted(extra.keys() & others.keys()):
        raise BadLine(double[0], 'is a field and also in "extra"', "keep one of the two")
    return ParsedLine(
        key=_key(value.get("id")),
        query=query,
        messages=messages,
        answer=_text(value, "answer"),
        scorer=_scorer(_text(value, "scorer"), known_scorer),
        demonstration=_text(value, "demonstration"),
        images=_images(value.get("images")),
        extra={**extra, **others},
    )


def _key(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise BadLine("id", f"is {'empty' if value == '' else f'a {_kind(value)}'}", "write a string that is not empty")
    return value


def _text(value: dict[str, Any], field: str) -> str | None:
    item = value.get(field)
    if item is not None and not isinstance(item, str):
        raise BadLine(field, f"is a {_kind(item)}, not a string", "put it in quotation marks")
    return item


def _scorer(name: str | None, known_scorer: Callable[[str], str | None]) -> str | None:
    if name is None:
        return None
    if (names := known_scorer(name)) is not None:
        raise BadLine("scorer", f"there is no scorer {name[:40]!r}", f"use one of {names}")
    return name


def _messages(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise BadLine("messages", f"is a {_kind(value)}, not a list", 'write [{"role": "user", "content": "..."}]')
    for number, message in enumerate(value):
        field = f"messages[{number}]"
        if not isinstance(message, dict):
            raise BadLine(field, f"is a {_kind(message)}, not an object", 'write {"role": ..., "content": ...}')
        if message.get("role") not in ROLES:
            raise BadLine(f"{field}.role", "is none of the roles", f"use one of {', '.join(ROLES)}")
        content = message.get("content")
        parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        calls_tools = content is None and message.get("tool_calls")
        if not isinstance(content, str) and not parts and not calls_tools:
            raise BadLine(f"{field}.content", f"is a {_kind(content)}", "write a string or a list of parts")
    return value or None


def _images(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadLine("images", f"is a {_kind(value)}, not a list", 'write ["https://..."]')
    for number, image in enumerate(value):
        if not isinstance(image, str) or not _is_image(image):
            raise BadLine(
                f"images[{number}]",
                "is neither an http(s) URL nor a data: image",
                "write https://HOST/PATH or data:image/png;base64,...",
            )
    return value


def _is_image(text: str) -> bool:
    """The form only: nothing is fetched."""
    if found := _DATA_IMAGE.match(text):
        try:
            return bool(base64.b64decode(text[found.end() :], validate=True))
        except (binascii.Error, ValueError):
            return False
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and not re.search(r"\s", text)
    except ValueError:
        return False


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
