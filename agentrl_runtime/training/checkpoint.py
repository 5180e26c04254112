"""Checkpoint files: written whole by rank 0, read by every rank.

`model.safetensors` holds the full float32 state under the names of transformers, `optimizer.safetensors` the two
moments and the step of AdamW by parameter name, `trainer_state.json` the place in the stream and the random state.
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from agentrl_runtime.databases import StreamPosition
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.learner import Learner
from agentrl_runtime.training.parallel import Ranks, full_tensor, gather_json, like_parameter
from agentrl_runtime.training.policies import OPTIMIZER_FILE, STATE_FILE, TRAINER_FILES

MODEL_FILE = "model.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")
#: Of the many files a model folder can hold, those that loading and tokenizing need.
_KEPT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")


class TrainerState(BaseModel):
    """What a trainer needs beside weights and optimizer to go on exactly where it stopped."""

    position: StreamPosition
    optimizer_steps: int
    ledger_steps: int
    rng: list[str]  # torch's generator state of each rank, base64


def side_files(folder: Path) -> list[Path]:
    """Config, tokenizer and template files of a model folder: all that training does not change."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name.endswith(_KEPT_SUFFIXES)
        and not path.name.endswith(_WEIGHT_SUFFIXES)
        and path.name not in TRAINER_FILES
    )


def weight_files(folder: Path) -> list[Path]:
    """The weights of a model folder. Raises AgentRLError when they are not safetensors."""
    index = folder / f"{MODEL_FILE}.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [index, *(folder / name for name in names)]
    if (folder / MODEL_FILE).is_file():
        return [folder / MODEL_FILE]
    raise AgentRLError(
        f"model folder {folder} has no {MODEL_FILE}",
        mend="save the model with save_pretrained, which writes safetensors",
    )


def save_checkpoint(
    learner: Learner, folder: Path | None, *, source: Path, position: StreamPosition, counts: tuple[int, int]
) -> None:
    """Write all files of a checkpoint into `folder`, which is rank 0's; the other ranks give None and send theirs.

    `source` is a model folder that gives config and tokenizer; `counts` are optimizer steps and ledger steps.
    """
    from safetensors.torch import save_file

    weights = full_weights(learner.model)
    moments = full_moments(learner)
    rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    state = TrainerState(
        position=position, optimizer_steps=counts[0], ledger_steps=counts[1], rng=gather_json(rng, learner.ranks)
    )
    if folder is None:
        return
    save_file(weights, folder / MODEL_FILE, metadata={"format": "pt"})
    save_file(moments, folder / OPTIMIZER_FILE)
    (folder / STATE_FILE).write_text(state.model_dump_json())
    for path in side_files(source):
        shutil.copyfile(path, folder / path.name)


def full_weights(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers whole, once each: a tied head is its embedding, which loading ties again."""
    weights = {name: full_tensor(parameter).contiguous() for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        if name not in parameters:
            weights[name] = full_tensor(value).contiguous()
    return weights


def full_moments(learner: Learner) -> dict[str, Tensor]:
    moments: dict[str, Tensor] = {}
    for name, parameter in learner.model.named_parameters():
        state = learner.optimizer.state.get(parameter)
        if not state:
            continue
        for moment in _MOMENTS:
            moments[f"{name}.{moment}"] = full_tensor(state[moment]).contiguous()
        moments[f"{name}.step"] = full_tensor(state["step"])
    return moments


def load_optimizer(learner: Learner, path: Path) -> None:
    """Give the optimizer the moments of a file. Raises AgentRLError naming the file and what does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        moments = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AgentRLError(f"{path.name} is not readable: {error}", mend="restore it from the object store") from None
    if not moments:
        return
    for name, parameter in learner.model.named_parameters():
        state: dict[str, Tensor] = {}
        for moment in _MOMENTS:
            whole = moments.get(f"{name}.{moment}")
            if whole is None or whole.shape != parameter.shape:
                raise AgentRLError(
                    f"{path.name}: {name}.{moment} is {'missing' if whole is None else tuple(whole.shape)}, "
                    f"the model has {tuple(parameter.shape)}",
                    mend="resume with the model that the checkpoint was made with",
                )
            state[moment] = like_parameter(whole, parameter)
        state["step"] = moments[f"{name}.step"]
        learner.optimizer.state[parameter] = state


def read_state(path: Path) -> TrainerState:
    try:
        return TrainerState.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise AgentRLError(f"{path.name} is not readable: {error}", mend="restore it from the object store") from None


def restore_rng(state: TrainerState | None, ranks: Ranks, seed: int) -> None:
    """The random state of the checkpoint, where the number of ranks is the same; else a seed for each rank."""
    if state is None or len(state.rng) != ranks.world:
        torch.manual_seed(seed + ranks.rank)
        return
    raw = bytearray(base64.b64decode(state.rng[ranks.rank]))
    torch.set_rng_state(torch.frombuffer(raw, dtype=torch.uint8))
