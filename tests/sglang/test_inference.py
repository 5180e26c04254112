"""The real server: what a call gives, new weights, refusals, and coming back from the dead."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Served, tiny_config

from agentrl_runtime.databases import InferenceService
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.inference import InferenceManager, ServerUnavailable, output_of

PROMPT = [5, 6, 14, 7, 8, 15]


def body(**sampling: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}
    return {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True, "logprob_start_len": -1}


async def test_a_call_gives_ids_logprobs_and_the_version_of_each_token(store: ObjectStore, sglang: Served) -> None:
    await sglang.manager.update_weights(sglang.folder, "server.v00001")
    ids, logprobs, spans, finish = output_of(await sglang.manager.generate(body(), timeout=60))
    assert len(ids) == len(logprobs) == 4 and finish == "length" and all(value <= 0 for value in logprobs)
    assert spans == [{"version": "server.v00001", "start": 0, "end": 4}]


async def test_new_weights_change_logprobs_and_version(store: ObjectStore, sglang: Served) -> None:
    await sglang.manager.update_weights(sglang.folder, "server.v00001")
    _, before, _, _ = output_of(await sglang.manager.generate(body(), timeout=60))
    await sglang.manager.update_weights(sglang.other_folder, "server.v00002")
    _, after, spans, _ = output_of(await sglang.manager.generate(body(), timeout=60))
    assert before != pytest.approx(after, abs=1e-4) and spans[0]["version"] == "server.v00002"
    service = await InferenceService.get(sglang.manager.service_id)
    assert service is not None and (service.status, service.weight_version) == ("ready", "server.v00002")
    await sglang.manager.update_weights(sglang.folder, "server.v00003")
    _, again, _, _ = output_of(await sglang.manager.generate(body(), timeout=60))
    assert again == pytest.approx(before, abs=1e-5)


async def test_refused_weights_leave_the_old_ones_serving(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    await sglang.manager.update_weights(sglang.folder, "server.v00004")
    with pytest.raises(AgentRLError, match=r"still serves server\.v00004"):
        await sglang.manager.update_weights(tmp_path / "nothing", "server.v00005")
    _, _, spans, _ = output_of(await sglang.manager.generate(body(), timeout=60))
    assert spans[0]["version"] == sglang.manager.weight_version == "server.v00004"


async def test_a_refused_call_says_why(store: ObjectStore, sglang: Served) -> None:
    with pytest.raises(AgentRLError, match="400"):
        await sglang.manager.generate({**body(), "input_ids": [5] * 500}, timeout=60)


async def test_a_killed_server_comes_back_with_its_weights(store: ObjectStore, sglang: Served) -> None:
    await sglang.manager.update_weights(sglang.other_folder, "server.v00006")
    _, before, _, _ = output_of(await sglang.manager.generate(body(), timeout=60))
    calls = [asyncio.create_task(sglang.manager.generate(body(max_new_tokens=100), timeout=60)) for _ in range(32)]
    await asyncio.sleep(0.1)
    kill_server(sglang.manager)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(answer, ServerUnavailable) for answer in answers)
    assert all(isinstance(answer, dict | ServerUnavailable) for answer in answers)
    while sglang.manager.ready.is_set():
        await asyncio.sleep(0.1)
    _, after, spans, _ = output_of(await sglang.manager.generate(body(), timeout=60))
    assert after == pytest.approx(before, abs=1e-5) and spans[0]["version"] == "server.v00006"
    assert sglang.manager.restarts == 1 and sglang.manager.in_flight == 0


def kill_server(manager: InferenceManager) -> None:
    """KILL the server's root process, as the kernel does when memory runs out."""
    assert manager._tree is not None
    psutil.Process(manager._tree.pid).children()[0].kill()


async def test_a_server_that_dies_at_start_shows_its_last_words(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory on model\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", str(python))
    async with InferenceManager(tiny_config("dead"), store) as manager:
        with pytest.raises(AgentRLError, match="out of memory on model"):
            await manager.start(tmp_path)
        service = await InferenceService.get(manager.service_id)
        assert service is not None and service.status == "down"


async def test_a_missing_environment_names_the_mend(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", str(tmp_path / "none"))
    async with InferenceManager(tiny_config("none"), store) as manager:
        with pytest.raises(AgentRLError, match="make setup"):
            await manager.start(tmp_path)
