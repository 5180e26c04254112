"""The tree that lineage questions are answered with."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Node:
    """One thing, what is known of it, and what it came from (trace) or went into (impact).

    `more` counts further children that were cut off; listing them all is up to the asker's limit.
    """

    kind: str
    id: str
    label: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    children: list["Node"] = field(default_factory=list)
    more: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def walk(self) -> "list[Node]":
        """This node and all below, top down."""
        return [self, *(node for child in self.children for node in child.walk())]


def cut(items: Sequence[T], limit: int | None) -> tuple[list[T], int]:
    """The first `limit` items (all when None) and how many are cut off."""
    shown = list(items if limit is None else items[:limit])
    return shown, len(items) - len(shown)


def known(**facts: Any) -> dict[str, Any]:
    """The facts that have a value."""
    return {name: value for name, value in facts.items() if value not in (None, "", [], {})}
