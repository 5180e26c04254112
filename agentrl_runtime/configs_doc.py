"""Writes docs/config.md, the table of every config field: `python -m agentrl_runtime.configs_doc > docs/config.md`."""

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl_runtime.configs import SECRET_FIELDS, AgentTrainingConfig

_HEAD = """# Configuration

One model, `AgentTrainingConfig`, is the YAML file, the command-line flags (`--learning_rate 1e-5`), Dagster's run
config and what lineage stores with a run. Unknown names and values out of bounds are refused. An experiment has one
config: a run that exists is not continued under another. This page is made by
`python -m agentrl_runtime.configs_doc > docs/config.md`.

| field | type | default | meaning |
|---|---|---|---|
"""


def config_page() -> str:
    """The page as Markdown, one row for each field in the order of the model."""
    return _HEAD + "".join(_row(name, field) for name, field in AgentTrainingConfig.model_fields.items())


def _row(name: str, field: FieldInfo) -> str:
    meaning = field.description or ""
    if limits := _limits(field):
        meaning = f"{meaning} ({limits})"
    if name in SECRET_FIELDS:
        meaning += " Never stored with a run."
    cells = (f"`{name}`", _type_name(field.annotation), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("pathlib.", "").replace("typing.", "").replace("_local.", "")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None else f"`{value}`"


def _limits(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs.items()
        if hasattr(item, name)
    ]
    return ", ".join(found)


if __name__ == "__main__":
    print(config_page(), end="")
