"""The documents: state, index and lineage. Bytes above 64 KB live in the object store by SHA-256."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field
from pymongo import ASCENDING, IndexModel

from agentrl_runtime.databases.base import Document, now, register_new_model

Split = Literal["train", "eval"]


class Source(BaseModel):
    """Where a task was read: the file's name, the SHA-256 of its bytes, and the line, counted from 1."""

    file: str
    sha256: str
    line: int


class WeightSpan(BaseModel):
    """Output tokens [start, end) of a call were sampled by the policy version of this id."""

    version: str
    start: int
    end: int


class FileDigest(BaseModel):
    name: str
    sha256: str
    size: int


class LeftOut(BaseModel):
    """A record that a shard does not hold, and why."""

    record_id: str
    reason: str


@register_new_model
class Task(Document):
    """One thing to attempt. Subclass and decorate with `@register_new_model` for fields of your own."""

    id: str = ""  # task_<24 hex>, from dataset and content; the scheduler fills an empty one
    dataset: str = ""
    task_key: str = ""  # the id in the task file
    query: str = ""
    messages: list[dict[str, Any]] | None = None
    answer: str | None = None
    scorer: str | None = None
    demonstration: str | None = None
    images: list[str] = Field(default_factory=list)
    extra: dict[str, Any] = Field(default_factory=dict)
    source: Source | None = None
    line: int = 0
    created: datetime = Field(default_factory=now)

    class Settings:
        name = "tasks"
        is_root = True
        indexes = [IndexModel([("dataset", ASCENDING), ("line", ASCENDING)])]

    def prompt_messages(self) -> list[dict[str, Any]]:
        return self.messages or [{"role": "user", "content": self.query}]


@register_new_model
class TaskDataset(Document):
    """One imported task file."""

    id: str  # dataset name
    file: str
    sha256: str
    tasks: int
    reported: bool = False
    created: datetime = Field(default_factory=now)

    class Settings:
        name = "task_datasets"


@register_new_model
class Run(Document):
    """One experiment: a resolved config and a tree of policy versions."""

    id: str  # run id
    state: Literal["running", "paused", "finished", "failed", "stopped"] = "running"
    reason: str = ""
    config: dict[str, Any]
    config_digest: str
    code_revision: str
    created: datetime = Field(default_factory=now)
    ended: datetime | None = None

    class Settings:
        name = "runs"
        indexes = [IndexModel([("state", ASCENDING)])]


@register_new_model
class TrajectoryBatch(Document):
    """The records sampled together; a Dagster partition."""

    id: str  # RUN.bNNNNN, or VERSION.eval
    run_id: str
    number: int
    split: Split
    dataset: str
    epoch: int
    task_ids: list[str]
    expected_records: int
    status: Literal["sampling", "complete"] = "sampling"
    stats: dict[str, Any] = Field(default_factory=dict)
    started: datetime = Field(default_factory=now)
    ended: datetime | None = None
    reported: bool = False

    @property
    def attempts(self) -> int:
        """Records of each task."""
        return self.expected_records // len(self.task_ids) if self.task_ids else 0

    class Settings:
        name = "trajectory_batches"
        indexes = [
            IndexModel([("run_id", ASCENDING), ("split", ASCENDING), ("number", ASCENDING)]),
            IndexModel([("run_id", ASCENDING), ("status", ASCENDING), ("reported", ASCENDING)]),
        ]


RecordStatus = Literal["queued", "leased", "completed", "truncated", "failed", "cancelled"]
#: A record in one of these is done: it will not be attempted again.
FINAL_STATUSES = ("completed", "truncated", "failed", "cancelled")


@register_new_model
class Record(Document):
    """One trajectory: one attempt at a task. Queued records are the work queue of the samplers."""

    id: str  # rec_<24 hex>, from batch, task and attempt
    run_id: str
    batch_id: str
    task_id: str
    attempt: int
    split: Split
    origin: Literal["sampled", "demonstration"] = "sampled"
    status: RecordStatus = "queued"
    reason: str = ""
    score: float | None = None
    score_detail: dict[str, Any] = Field(default_factory=dict)
    call_ids: list[str] = Field(default_factory=list)
    lease_token: str | None = None
    lease_expires: datetime | None = None
    last_token: str | None = None  # the lease that wrote the outcome
    fence: int = 0  # counts leases: a writer whose fence is older is refused
    tries: int = 0
    created: datetime = Field(default_factory=now)
    ended: datetime | None = None

    class Settings:
        name = "records"
        is_root = True
        indexes = [
            IndexModel([("batch_id", ASCENDING), ("status", ASCENDING)]),
            IndexModel([("task_id", ASCENDING)]),
        ]


@register_new_model
class DispatchedSamplingTask(Document):
    """One model call inside a record, exactly as the server saw and answered it.

    `prompt_ids`, `output_ids` and `output_logprobs` are inline up to 64 KB together, else in the object
    store under `tokens_sha256` (see storage.bodies).
    """

    id: str  # call_<24 hex>
    run_id: str
    batch_id: str
    record_id: str
    task_id: str
    turn: int
    service_id: str
    request: dict[str, Any]  # messages and sampling parameters
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    output_logprobs: list[float] | None = None
    tokens_sha256: str | None = None
    weight_spans: list[WeightSpan] = Field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    status: Literal["completed", "failed"] = "completed"
    reason: str = ""
    started: datetime
    ended: datetime

    class Settings:
        name = "calls"
        indexes = [
            IndexModel([("record_id", ASCENDING), ("turn", ASCENDING)]),
            IndexModel([("batch_id", ASCENDING)]),
        ]


@register_new_model
class Shard(Document):
    """Immutable Parquet of training samples: (batch, filter spec) -> rows, and why others are left out."""

    id: str  # sha256 of the Parquet bytes
    run_id: str
    batch_id: str
    seq: int | None  # place in the run's stream, from 1 without gaps; None: not in the stream
    filter_spec: dict[str, Any]
    filter_digest: str
    code_revision: str
    rows: int
    tokens: int
    size: int
    left_out: list[LeftOut] = Field(default_factory=list)
    stats: dict[str, Any] = Field(default_factory=dict)
    created: datetime = Field(default_factory=now)
    reported: bool = False

    class Settings:
        name = "shards"
        indexes = [
            IndexModel(
                [("run_id", ASCENDING), ("seq", ASCENDING)],
                unique=True,
                partialFilterExpression={"seq": {"$type": "int"}},
            ),
            # One shard of a batch is in the stream: a batch can never be trained twice.
            IndexModel(
                [("run_id", ASCENDING), ("batch_id", ASCENDING)],
                unique=True,
                partialFilterExpression={"seq": {"$type": "int"}},
            ),
            IndexModel([("batch_id", ASCENDING)]),
            IndexModel([("run_id", ASCENDING), ("reported", ASCENDING)]),
        ]


@register_new_model
class DBRecordData(Document):
    """Index of one training sample: which record became which row of which shard. Tokens are in the shard."""

    id: str  # smp_<24 hex>@<first 12 hex of the shard>
    sample_id: str
    record_id: str
    task_id: str
    batch_id: str
    shard_id: str
    row: int
    tokens: int
    trained_tokens: int
    score: float | None
    advantage: float
    group: dict[str, Any] = Field(default_factory=dict)  # estimator, mean, std, scores used

    class Settings:
        name = "samples"
        indexes = [
            IndexModel([("sample_id", ASCENDING)]),
            IndexModel([("record_id", ASCENDING)]),
            IndexModel([("shard_id", ASCENDING), ("row", ASCENDING)]),
        ]


class StreamPosition(BaseModel):
    """The trainer's place: rows [0, row) of pass `pass_number` of the shard of this `seq` are done, and
    every shard before it. `row` counts in the seeded order of the pass."""

    seq: int = 0
    pass_number: int = 0
    row: int = 0


@register_new_model
class StepLedger(Document):
    """One optimizer step: rows [start, stop) of a seeded pass over one shard. Counts only when its policy
    version is committed. An empty shard gets an entry with start == stop and no optimizer step."""

    id: str  # RUN.sNNNNN
    run_id: str
    number: int
    version_id: str
    shard_id: str
    seq: int | None
    pass_number: int
    order_seed: str
    start: int
    stop: int
    optimizer_step: bool
    left_out: list[LeftOut] = Field(default_factory=list)  # rows of the range that were not trained, and why
    metrics: dict[str, float]
    created: datetime = Field(default_factory=now)

    class Settings:
        name = "step_ledger"
        indexes = [
            IndexModel([("shard_id", ASCENDING)]),
            IndexModel([("version_id", ASCENDING)]),
            IndexModel([("run_id", ASCENDING), ("number", ASCENDING)]),
        ]


@register_new_model
class PolicyVersion(Document):
    """One published checkpoint. Inserting this document is the commit of its steps."""

    id: str  # RUN.vNNNNN
    run_id: str
    number: int
    parent: str | None  # policy version id, possibly of another run; None: `origin` tells
    origin: str = ""  # model folder of a root version without parent
    first_step: int
    last_step: int  # steps (first_step .. last_step]
    shard_ids: list[str]
    position: StreamPosition
    config_digest: str
    code_revision: str
    files: list[FileDigest]
    statistics_sha256: str | None  # Parquet of per-row loss, ratio, clipped fraction, staleness
    metrics: dict[str, float] = Field(default_factory=dict)
    seconds: float = 0.0
    final: bool = False
    created: datetime = Field(default_factory=now)
    reported: bool = False
    served_reported: bool = False
    served: datetime | None = None

    class Settings:
        name = "policy_versions"
        indexes = [
            IndexModel([("run_id", ASCENDING), ("number", ASCENDING)], unique=True),
            IndexModel([("parent", ASCENDING)]),
            IndexModel([("run_id", ASCENDING), ("reported", ASCENDING)]),
        ]


@register_new_model
class EvalReport(Document):
    """Greedy evaluation of one policy version on unseen tasks."""

    id: str  # VERSION.eval
    run_id: str
    version_id: str
    dataset: str
    records: int
    mean_score: float
    accuracy: float  # share of records with score 1
    failed: int
    seconds: float
    created: datetime = Field(default_factory=now)
    reported: bool = False

    class Settings:
        name = "eval_reports"
        indexes = [
            IndexModel([("version_id", ASCENDING)]),
            IndexModel([("run_id", ASCENDING), ("reported", ASCENDING)]),
        ]


@register_new_model
class InferenceService(Document):
    """One running inference server."""

    id: str  # svc_<hex>
    run_id: str
    url: str
    pid: int
    status: Literal["starting", "ready", "updating", "down", "stopped"]
    reason: str = ""
    weight_version: str = ""  # policy version id
    in_flight: int = 0
    heartbeat: datetime = Field(default_factory=now)
    created: datetime = Field(default_factory=now)

    class Settings:
        name = "inference_services"
        indexes = [IndexModel([("run_id", ASCENDING), ("status", ASCENDING)])]
