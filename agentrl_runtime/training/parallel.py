"""The process group, FSDP2 over it, and what all ranks do together.

torch is needed here at import: nothing that starts the command line imports this file.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl_runtime.errors import AgentRLError

_STRETCH = 1 << 16  # elements


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start_ranks(*, store: Any = None, rank: int | None = None, world: int | None = None) -> Ranks:
    """Join the process group that torchrun describes in the environment, or a group of one without it.

    Tensors on the CPU (plans, statistics) go by gloo, those of the model by NCCL where there are GPUs.
    `store`, `rank` and `world` serve tests that fork their ranks.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    if store is None and world == 1:
        store = dist.HashStore()
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return Ranks(rank, world, device, init_device_mesh(device.type, (world,), mesh_dim_names=("data",)))


def stop_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# --- the model over the ranks ---------------------------------------------------------------------------


def shard_policy(policy: nn.Module, ranks: Ranks, *, compute_dtype: torch.dtype) -> nn.Module:
    """Shard the float32 parameters over all ranks: each decoder layer by itself, the rest with the root.

    Forward and backward compute in `compute_dtype`; gradients are averaged over the ranks in float32.
    Raises AgentRLError for a model whose parameters are not float32.
    """
    wrong = [name for name, parameter in policy.named_parameters() if parameter.dtype != torch.float32]
    if wrong:
        raise AgentRLError(f"parameter {wrong[0]} is not float32", mend="load the model with dtype=torch.float32")
    mixed = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=mixed)
    fully_shard(policy, mesh=ranks.mesh, mp_policy=mixed)
    return policy


def decoder_layers(policy: nn.Module) -> Iterator[nn.Module]:
    """The blocks that the model's class says belong together."""
    model = getattr(policy, "model", policy)
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            yield module


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on the CPU of every rank; all ranks must call it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


def like_parameter(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, laid out as the parameter is; every rank has the whole."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks) -> float:
    """The global L2 norm: squares of each rank's shards, added in float64 over the ranks."""
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            total += sum_of_squares(local.detach())
    if ranks.world > 1:
        dist.all_reduce(total)
    return float(total.sqrt())


def sum_of_squares(tensor: Tensor) -> Tensor:
    """A float64 scalar, right to about 1e-7 for any size, in one pass and without a float64 copy.

    The CPU's norm kernels add in float32 one after the other (1% off at 1e8 elements), so there short stretches
    are added in float64; a GPU reduces as a tree.
    """
    if tensor.device.type != "cpu":
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square()
    return torch.stack([torch.dot(part, part) for part in tensor.flatten().split(_STRETCH)]).double().sum()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# --- messages between the ranks -------------------------------------------------------------------------


def broadcast_bytes(data: bytes | None, ranks: Ranks) -> bytes:
    """Bytes of rank 0 on every rank; the others give None."""
    if ranks.world == 1:
        assert data is not None
        return data
    size = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(size, src=0)
    if data is not None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def gather_json(value: Any, ranks: Ranks) -> list[Any]:
    """The value of each rank, in their order, on every rank."""
    if ranks.world == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    width = max(int(size) for size in sizes)
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: len(data)] = data
    parts = [torch.empty(width, dtype=torch.uint8) for _ in range(ranks.world)]
    dist.all_gather(parts, padded)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def sum_over_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Element-wise sum of a CPU tensor over the ranks."""
    if ranks.world > 1:
        dist.all_reduce(tensor)
    return tensor


def wait_for_all(ranks: Ranks) -> None:
    sum_over_ranks(torch.zeros(1), ranks)
