"""One configuration: command-line flags, YAML file, Dagster run config and what lineage stores are this model."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import is_run_id

#: Connection strings carry passwords: they are resolved on each machine and never stored with a run.
SECRET_FIELDS = frozenset({"db_connection_string", "oss_connection_string"})

#: SGLang's sampling parameters of /generate that a caller may set. Several answers to one request are several calls.
SAMPLING_PARAMETERS = frozenset(
    {
        "custom_params",
        "ebnf",
        "frequency_penalty",
        "ignore_eos",
        "json_schema",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "no_stop_trim",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "structural_tag",
        "temperature",
        "top_k",
        "top_p",
    }
)


def sampling_fault(parameters: Mapping[str, Any]) -> str:
    """What is wrong with these sampling parameters; empty when nothing is."""
    unknown = sorted(parameters.keys() - SAMPLING_PARAMETERS)
    if unknown:
        return f"{unknown[0]} is no sampling parameter; there are {', '.join(sorted(SAMPLING_PARAMETERS))}"
    for name, value in parameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
    temperature = parameters.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature < 0:
        return f"temperature is {temperature!r:.50}; it is a number of 0 or more"
    return ""


class AgentTrainingConfig(BaseSettings):
    """Everything one run (one experiment) depends on."""

    model_config = SettingsConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )

    run_id: str = Field("run", description="Name of the experiment; begins every id that it makes.")
    stage: Literal["sft", "rl"] = Field(
        "rl", description="sft trains on the demonstrations of the task file, rl on sampled trajectories."
    )

    # model
    model_name_or_path: str = Field(
        description="Model to start from: a local folder, a policy version id, or `RUN.latest`."
    )
    model_init_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further arguments of from_pretrained.")
    processor_name: str | None = Field(None, description="Tokenizer folder, when not the model's own.")
    output_dir: Path = Field(Path("output"), description="Folder for logs and local work files of this run.")

    # data
    train_file: Path | None = Field(None, description="Task file (JSONL) to train on.")
    eval_file: Path | None = Field(None, description="Task file (JSONL) of unseen tasks for evaluation.")
    dataset: str | None = Field(None, description="Name of the training dataset; default: the file's stem.")
    max_prompt_tokens: int = Field(2048, ge=1, description="Longest prompt that is sampled from, in tokens.")
    max_trained_count: int = Field(
        1, ge=1, description="Times the trainer passes over each shard in rl; sft uses num_train_epochs."
    )

    # sampling
    num_generations: int = Field(8, ge=1, description="Attempts at each task of a trajectory batch.")
    prompts_per_batch: int = Field(32, ge=1, description="Tasks of one trajectory batch.")
    max_new_tokens: int = Field(256, ge=1, description="Longest reply of one model call, in tokens.")
    max_turns: int = Field(1, ge=1, description="Most model calls of one record.")
    target_concurrency: int = Field(32, ge=1, description="Model calls in flight on one inference service.")
    max_concurrent_samples_per_process: int = Field(
        64, ge=1, description="Records that one rollout process works on at a time."
    )
    preferred_sampling_params: dict[str, Any] = Field(
        default_factory=lambda: {"temperature": 1.0},
        description="SGLang sampling parameters of training calls, such as temperature and top_p.",
    )
    resample_error_records: bool = Field(
        True, description="Attempt a record again (three times at most) when it failed by an error."
    )
    lease_seconds: float = Field(
        60.0, gt=0, description="A claimed record is given back when its holder is silent this long."
    )
    max_policy_lag: int = Field(
        1, ge=0, description="Most policy versions between the one that samples and the one that trains."
    )
    eval_every: int = Field(5, ge=1, description="Evaluate every this many policy versions, the first and last.")

    # inference service
    inf_tp_size: int = Field(1, ge=1, description="Tensor parallel size of the inference server.")
    inf_mem_ratio: float = Field(0.8, gt=0, le=1, description="Share of GPU memory the server may take.")
    inf_context_length: int = Field(4096, ge=16, description="Longest sequence the server holds, in tokens.")

    # advantages and filters
    advantage_estimator: Literal["group_norm", "group_mean"] = Field(
        "group_norm", description="Scores to advantages in a group: (s - mean) / std, or s - mean."
    )
    adv_scaling: float = Field(1.0, gt=0, description="Factor on every advantage.")
    minimal_advantage: float | None = Field(
        None, ge=0, description="Leave out samples whose |advantage| is below this."
    )
    drop_zero_advantage: bool = Field(False, description="Leave out samples whose advantage is zero.")
    skip_non_positive_advantage: bool = Field(False, description="Leave out samples with advantage <= 0.")
    drop_truncated: bool = Field(False, description="Leave out records whose last call ended by length.")

    # loss and optimisation
    loss_calculater: Literal["CrossEntropy", "GRPO"] = Field("GRPO", description="Loss.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    adam_betas: tuple[float, float] = Field((0.9, 0.99), description="AdamW's moment decay rates.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    epsilon: float = Field(0.2, gt=0, description="Ratio clip: lower bound is 1 - epsilon.")
    epsilon_higher: float = Field(0.0, ge=0, description="Ratio clip: upper bound is 1 + epsilon + epsilon_higher.")
    token_level_loss: bool = Field(True, description="Mean over tokens of the global batch, else over sequences.")
    skip_length_normalization: bool = Field(
        False, description="With sequence-level loss: sum over a sequence's tokens, not their mean."
    )
    per_device_train_batch_size: int = Field(8, ge=1, description="Rows a rank takes per accumulation step.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Accumulation steps per optimizer step.")
    num_train_epochs: int = Field(1, ge=1, description="Passes over the training tasks.")
    max_steps: int = Field(-1, description="Stop after this many optimizer steps; -1: after the epochs.")
    save_steps: int = Field(1, ge=1, description="Publish a policy version every this many optimizer steps.")
    seed: int = Field(0, ge=0, description="Seed of task order, row order and sampling.")
    max_tokens: int = Field(4096, ge=16, description="Most tokens of one packed row in training.")
    microbatch_tokens: int = Field(4096, ge=16, description="Most tokens of one forward pass, padding included.")
    loss_seq_chunk_size: int = Field(1024, ge=1, description="Tokens whose logits are held at a time.")
    world_size: int = Field(1, ge=1, description="Trainer processes that torchrun starts (FSDP2 over all).")

    # stores
    db_connection_string: str | None = Field(
        None, description="MongoDB URI; default: AGENTRL_MONGO_URI or the embedded server."
    )
    enable_oss: bool = Field(True, description="Keep bodies and token arrays above 64 KB in the object store.")
    oss_connection_string: str | None = Field(
        None, description="minio://key:secret@host:port/bucket?secure=; default: AGENTRL_S3_URL or embedded."
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: Any, init_settings: Any, env_settings: Any, dotenv_settings: Any, file_secret_settings: Any
    ) -> tuple[Any, ...]:
        """Only explicit values: an environment variable such as SEED must not change an experiment."""
        return (init_settings,)

    @field_validator("run_id")
    @classmethod
    def _run_id_has_the_form(cls, value: str) -> str:
        if not is_run_id(value):
            raise ValueError("use lower-case letters, digits and hyphens, beginning with a letter or digit")
        return value

    @field_validator("preferred_sampling_params")
    @classmethod
    def _sampling_is_known(cls, value: dict[str, Any]) -> dict[str, Any]:
        if fault := sampling_fault(value):
            raise ValueError(fault)
        return value

    @field_validator("oss_connection_string")
    @classmethod
    def _oss_has_the_form(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in {"minio", "http", "https"}:
            raise ValueError("use minio://key:secret@host:port/bucket?secure=false")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.stage == "sft" and self.loss_calculater != "CrossEntropy":
            raise ValueError("stage sft trains demonstrations: set loss_calculater to CrossEntropy")
        if self.stage == "rl" and self.loss_calculater == "CrossEntropy":
            raise ValueError("stage rl trains sampled trajectories: set loss_calculater to GRPO")
        if self.skip_length_normalization and self.token_level_loss:
            raise ValueError("skip_length_normalization needs a sequence-level loss: set token_level_loss to false")
        return self

    @property
    def dataset_name(self) -> str:
        if self.dataset:
            return self.dataset
        if self.train_file is None:
            raise AgentRLError("run has no training data", mend="set train_file or dataset")
        return self.train_file.stem

    @property
    def sampling_temperature(self) -> float:
        """What the server divides logits by in training calls. A temperature of 0 samples greedily, from logits
        as they are."""
        return float(self.preferred_sampling_params.get("temperature", 1.0)) or 1.0

    @property
    def rows_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def passes(self) -> int:
        """Times the trainer goes over each shard."""
        return self.num_train_epochs if self.stage == "sft" else self.max_trained_count

    def public_dict(self) -> dict[str, Any]:
        """JSON-ready values without connection strings: what lineage stores and UIs show."""
        return self.model_dump(mode="json", exclude=set(SECRET_FIELDS))

    def digest(self) -> str:
        """SHA-256 of the public values in canonical JSON."""
        text = json.dumps(self.public_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def write_yaml(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.public_dict(), sort_keys=False))


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> AgentTrainingConfig:
    """Read a YAML file; `overrides` win over it.

    Raises AgentRLError naming the file and each wrong field.
    """
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise AgentRLError(f"config file {path} does not exist", mend="check the path given to --config") from None
    except yaml.YAMLError as error:
        raise AgentRLError(f"config file {path} is not YAML: {error}", mend="mend the line it names") from None
    if not isinstance(values, dict):
        raise AgentRLError(f"config file {path} holds no mapping", mend="write `name: value` lines")
    return validated({**values, **(overrides or {})}, where=str(path))


def validated(values: dict[str, Any], *, where: str) -> AgentTrainingConfig:
    """The config of plain values; AgentRLError names `where` and each wrong field."""
    try:
        return AgentTrainingConfig(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'config'}: {item['msg']}" for item in error.errors()
        )
        raise AgentRLError(f"{where}: {problems}", mend="see the field descriptions in docs/config.md") from None
