"""Lineage as text: trees, and records that a person can read."""

import io
from typing import TYPE_CHECKING, Any

from agentrl_runtime.lineage.detail import CallDetail, RecordDetail
from agentrl_runtime.lineage.nodes import Node

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree


def visible(text: str) -> str:
    """Text of a model or a file without the control characters that could steer a terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1] for character in text
    )


def render_tree(node: Node, width: int | None = None) -> str:
    return _printed(_tree(node), width)


def _tree(node: Node) -> "Tree":
    from rich.tree import Tree

    tree = Tree(_line(node))
    for child in node.children:
        _grow(tree, child)
    _cut_off(tree, node)
    return tree


def _grow(tree: "Tree", node: Node) -> None:
    branch = tree.add(_line(node))
    for child in node.children:
        _grow(branch, child)
    _cut_off(branch, node)


def _cut_off(branch: "Tree", node: Node) -> None:
    from rich.text import Text

    if node.more:
        branch.add(Text(f"and {node.more} more (--all lists them)", style="dim"))


def _line(node: Node) -> "Text":
    from rich.text import Text

    line = Text.assemble((node.kind, "bold"), " ", (node.id, "cyan"))
    if node.label:
        line.append("  " + visible(node.label).replace("\n", " "))
    if node.facts:
        facts = ", ".join(f"{name}={_value(value)}" for name, value in node.facts.items())
        line.append("  " + visible(facts).replace("\n", " "), style="dim")
    return line


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return " ".join(_value(item) for item in value)
    return str(value)


def render_record(detail: RecordDetail, width: int | None = None) -> str:
    """A record as a person reads it: task, each call's prompt, reply and tokens, samples and steps."""
    lines = [
        f"record  {detail.id}  {detail.status}" + (f": {detail.reason}" if detail.reason else ""),
        f"score   {'none' if detail.score is None else f'{detail.score:g}'}"
        + (f"  {_value(detail.score_detail)}" if detail.score_detail else ""),
        f"task    {detail.task}  {detail.task_line}",
        f"query   {detail.query}",
        f"answer  {'none' if detail.answer is None else detail.answer}",
        f"batch   {detail.batch}",
    ]
    for sample in detail.samples:
        lines.append(
            f"sample  {sample['sample_id']}  row {sample['row']} of shard {sample['shard_id'][:12]}"
            f"  advantage {sample['advantage']:.4f}"
        )
    text = visible("\n".join(lines)) + "\n"
    for call in detail.calls:
        text += _call(call, width)
    for step in detail.steps:
        text += render_tree(step, width)
    return text


def _call(call: CallDetail, width: int | None) -> str:
    from rich.table import Table
    from rich.text import Text

    lines = [f"\ncall {call.turn}  {call.id}  {call.prompt_tokens} prompt tokens, ended by {call.finish or 'nothing'}"]
    lines += [f"  {message.get('role')}: {message.get('content')}" for message in call.prompt]
    lines.append(f"  reply: {call.text}")
    text = visible("\n".join(lines)) + "\n"
    if not call.tokens:
        return text
    table = Table("token", "text", "logprob", "version", box=None, padding=(0, 2))
    for token in call.tokens:
        shown = "" if token.text is None else repr(token.text)
        table.add_row(*map(Text, (str(token.id), visible(shown), f"{token.logprob:.4f}", str(token.version))))
    return text + _printed(table, width)


def _printed(item: Any, width: int | None) -> str:
    """As on a terminal of this width (the terminal's own by default), without colour when piped."""
    from rich.console import Console

    real = Console()
    sink = io.StringIO()
    console = Console(
        file=sink, width=width or (real.width if real.is_terminal else 240), force_terminal=real.is_terminal
    )
    console.print(item, soft_wrap=not real.is_terminal)
    return sink.getvalue()
