"""Ids: one spelling for the database, Dagster partitions and the command line.

Ids of things that work produces are derived from what they stand for, so that work done again after a
crash writes the same ids and cannot double anything.
"""

import hashlib
import re
from typing import Literal

Kind = Literal["task", "record", "call", "sample", "version", "batch", "step", "shard", "run"]

_PREFIXES: dict[str, Kind] = {"task_": "task", "rec_": "record", "call_": "call", "smp_": "sample"}
_RUN = r"[a-z0-9][a-z0-9-]*"
_PATTERNS: list[tuple[re.Pattern[str], Kind]] = [
    (re.compile(rf"{_RUN}\.v\d{{5,}}\.eval"), "batch"),
    (re.compile(rf"{_RUN}\.v\d{{5,}}"), "version"),
    (re.compile(rf"{_RUN}\.b\d{{5,}}"), "batch"),
    (re.compile(rf"{_RUN}\.s\d{{5,}}"), "step"),
    (re.compile(r"[0-9a-f]{64}"), "shard"),
]


def derived_id(prefix: str, *parts: object) -> str:
    """`prefix` + 24 hex digits of the SHA-256 of the parts, separated so that no two lists collide."""
    text = "\x1f".join(str(part) for part in parts)
    return prefix + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:24]


def record_id(batch_id: str, task_id: str, attempt: int) -> str:
    return derived_id("rec_", batch_id, task_id, attempt)


def call_id(record_id: str, lease_token: str, turn: int) -> str:
    """A call belongs to one lease of a record: a second lease after a crash makes calls of its own."""
    return derived_id("call_", record_id, lease_token, turn)


def sample_id(record_id: str, segment: int) -> str:
    return derived_id("smp_", record_id, segment)


def version_id(run_id: str, number: int) -> str:
    return f"{run_id}.v{number:05d}"


def batch_id(run_id: str, number: int) -> str:
    return f"{run_id}.b{number:05d}"


def eval_batch_id(version: str) -> str:
    return f"{version}.eval"


def step_id(run_id: str, number: int) -> str:
    return f"{run_id}.s{number:05d}"


def is_run_id(text: str) -> bool:
    return re.fullmatch(_RUN, text) is not None


def kind_of(text: str) -> Kind | None:
    """What an id names, or None when it has the form of no id."""
    for prefix, kind in _PREFIXES.items():
        if text.startswith(prefix):
            return kind
    for pattern, kind in _PATTERNS:
        if pattern.fullmatch(text):
            return kind
    return "run" if is_run_id(text) else None
