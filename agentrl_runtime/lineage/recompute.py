"""Behaviour logprobs computed again with the policy version that is on record for each token."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_runtime.databases import DBRecordData, PolicyVersion, Shard
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.lineage.reading import fetch
from agentrl_runtime.runs import config_of, get_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.policies import fetch_version
from agentrl_runtime.training.shards import read_rows


@dataclass
class LogprobReport:
    """Largest and mean |recorded - recomputed| over the sampled tokens of some samples."""

    run_id: str
    samples: int
    tokens: int
    max_difference: float
    mean_difference: float
    worst_sample: str

    def __str__(self) -> str:
        return (
            f"logprobs of {self.tokens} tokens of {self.samples} samples differ by {self.max_difference:.3g} at most "
            f"({self.worst_sample}), {self.mean_difference:.3g} on average"
        )


async def recompute_logprobs(
    run_id: str, store: ObjectStore, sample_ids: Sequence[str] | None = None, limit: int = 16
) -> LogprobReport:
    """Recompute with transformers in float32 on the CPU; the samples named, or `limit` spread over the stream.

    Logits are divided by the run's sampling temperature, as the server does. Raises AgentRLError when there is
    no sampled row to look at.
    """
    config = config_of(await get_run(run_id))
    rows = await _sampled_rows(store, run_id, sample_ids, limit)
    if not rows:
        raise AgentRLError(
            f"run {run_id} has no sampled rows to recompute", mend="sample a batch first, or name others"
        )
    names = sorted({name for row in rows for name in row["version_ids"]})
    versions = {version.id: version for version in await PolicyVersion.find({"_id": {"$in": names}}).to_list()}
    if missing := [name for name in names if name not in versions]:
        raise AgentRLError(f"policy version {missing[0]} is not in the database", mend="restore its document")
    temperature = config.sampling_temperature
    differences: list[tuple[float, str]] = []
    for name in names:
        own = [row for row in rows if name in row["version_ids"]]
        differences += await asyncio.to_thread(_differences, store, versions[name], own, temperature)
    largest, sample = max(differences)
    mean = sum(value for value, _ in differences) / len(differences)
    return LogprobReport(run_id, len(rows), len(differences), largest, mean, sample)


async def _sampled_rows(
    store: ObjectStore, run_id: str, sample_ids: Sequence[str] | None, limit: int
) -> list[dict[str, Any]]:
    shards = await fetch(Shard, {"run_id": run_id, "seq": {"$type": "int"}}, ("seq", "rows"))
    shards = sorted((shard for shard in shards if shard["rows"]), key=lambda shard: shard["seq"])
    if sample_ids is not None:
        query = {"sample_id": {"$in": list(sample_ids)}, "shard_id": {"$in": [shard["_id"] for shard in shards]}}
        places = [(item["shard_id"], item["row"]) for item in await fetch(DBRecordData, query, ("shard_id", "row"))]
    else:
        every = [(shard["_id"], row) for shard in shards for row in range(shard["rows"])]
        places = every[:: max(1, len(every) // limit)][:limit]
    wanted: dict[str, list[int]] = {}
    for shard_id, row in places:
        wanted.setdefault(shard_id, []).append(row)
    rows = []
    for shard_id, numbers in wanted.items():
        table = await asyncio.to_thread(read_rows, store, shard_id)
        rows += [row for row in table.take(numbers).to_pylist() if row["call_ids"]]
    return rows


def _differences(
    store: ObjectStore, version: PolicyVersion, rows: list[dict[str, Any]], temperature: float
) -> list[tuple[float, str]]:
    """(|recorded - recomputed|, sample id) of each token that this version sampled."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(fetch_version(version, store), dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            logprobs = torch.log_softmax(model(ids).logits[0, :-1].float() / temperature, dim=-1)
            chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
            for place in range(1, ids.shape[1]):
                if row["token_versions"][place] == version.number and row["loss_mask"][place]:
                    found.append((abs(chosen[place - 1] - row["rollout_logprobs"][place]), row["sample_id"]))
    return found
