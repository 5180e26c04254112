"""What rank 0 tells all ranks to do, one message at a time."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from agentrl_runtime.databases import StreamPosition
from agentrl_runtime.training.parallel import Ranks, broadcast_bytes


@dataclass(frozen=True)
class Start:
    """Load the model of `folder`, and the optimizer and random state of `resume` where there is one."""

    folder: str
    resume: str | None


@dataclass(frozen=True)
class Learn:
    """Take optimizer step `step` over these rows (`numbers` in their shard), trained as of version `version`."""

    name: str
    step: int
    version: int
    shard_id: str
    numbers: list[int]
    rows: pa.Table = field(repr=False)


@dataclass(frozen=True)
class Save:
    position: StreamPosition
    optimizer_steps: int
    ledger_steps: int


@dataclass(frozen=True)
class Idle:
    """Nothing to do now; keeps the other ranks from waiting longer than a collective may."""


@dataclass(frozen=True)
class End:
    pass


Message = Start | Learn | Save | Idle | End

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Start, Learn, Save, Idle, End)}


def receive(messages: Iterator[Message] | None, ranks: Ranks) -> Message:
    """The next message, on every rank; `messages` is rank 0's, and its end is `End`.

    When making the message fails, the other ranks get `End` and rank 0 the error.
    """
    if messages is None:
        return decode(broadcast_bytes(None, ranks))
    try:
        message = next(messages, End())
    except BaseException:
        send_end(ranks)
        raise
    if ranks.world > 1:
        broadcast_bytes(encode(message), ranks)
    return message


def send_end(ranks: Ranks) -> None:
    """Let the other ranks go, which wait for the next message."""
    if ranks.world > 1:
        broadcast_bytes(encode(End()), ranks)


def encode(message: Message) -> bytes:
    """An Arrow stream: the table of `Learn`, or an empty one, with the other fields as JSON in its schema."""
    fields = {item.name: getattr(message, item.name) for item in dataclasses.fields(message) if item.name != "rows"}
    if isinstance(message, Save):
        fields["position"] = message.position.model_dump()
    table = message.rows if isinstance(message, Learn) else pa.table({})
    header = json.dumps({"kind": type(message).__name__, **fields})
    table = table.replace_schema_metadata({"message": header})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode(data: bytes) -> Message:
    table = pa.ipc.open_stream(data).read_all()
    fields = json.loads(table.schema.metadata[b"message"])
    kind = _KINDS[fields.pop("kind")]
    if kind is Learn:
        fields["rows"] = table
    if kind is Save:
        fields["position"] = StreamPosition(**fields["position"])
    return kind(**fields)
