"""The inference server of a rollout process: started, watched, given new weights, restarted, stopped."""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import uuid
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from pymongo.errors import PyMongoError

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import InferenceService, PolicyVersion, now
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.doctor import sglang_python
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.processes import ProcessTree, start_tree
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.policies import fetch_version

_START_SECONDS = 600.0
_UPDATE_SECONDS = 600.0
_HEARTBEAT_SECONDS = 3.0
_POLL_SECONDS = 0.5
#: A service without a heartbeat for so long is taken for dead.
_SILENT_SECONDS = 20.0
_RESTARTS = 5
_LAUNCHER = Path(__file__).parents[1] / "rollout" / "sglang_cpu.py"
#: The weights a server has before its first update, when it was started from a bare model folder.
UNPUBLISHED = "unpublished"


class ServerUnavailable(AgentRLError):
    """The server is down or restarting: the call can be made again."""


@cache
def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers; asked without importing torch."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def server_argv(config: AgentTrainingConfig, folder: Path, port: int, weight_version: str) -> list[str]:
    """The command line of one SGLang server: CPU launcher without a GPU, SGLang's own with one."""
    python = sglang_python()
    if not python.exists():
        raise AgentRLError(f"SGLang's environment {python} does not exist", mend="run `make setup`")
    common = [
        *("--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port)),
        *("--weight-version", weight_version, "--random-seed", str(config.seed + 1)),
        *("--context-length", str(config.inf_context_length), "--skip-server-warmup"),
        *("--max-running-requests", str(config.target_concurrency), "--log-level", "warning"),
    ]
    if has_gpu():
        return [
            *(str(python), "-m", "sglang.launch_server", *common),
            *("--tp", str(config.inf_tp_size), "--mem-fraction-static", str(config.inf_mem_ratio)),
        ]
    if config.inf_tp_size != 1:
        raise AgentRLError(f"inf_tp_size is {config.inf_tp_size} without a GPU", mend="set inf_tp_size to 1")
    tokens = config.target_concurrency * config.inf_context_length
    return [
        *(str(python), str(_LAUNCHER), *common, "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", str(min(tokens, 65536))),
        "--sleep-on-idle",  # else an idle server takes a whole core from the trainer
    ]


class InferenceManager:
    """One SGLang server for a run; an async context manager that leaves no process behind.

    `ready` is set while the server takes calls. `weight_version` is the policy version id it serves, or
    UNPUBLISHED.
    """

    def __init__(self, config: AgentTrainingConfig, store: ObjectStore) -> None:
        self.config, self.store = config, store
        self.service_id = f"svc_{uuid.uuid4().hex[:16]}"
        self.weight_version = UNPUBLISHED
        self.in_flight = 0
        self.ready = asyncio.Event()
        self.failed: AgentRLError | None = None
        self.restarts = 0
        self.url = ""
        self._folder: Path | None = None
        self._tree: ProcessTree | None = None
        self._changing = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "InferenceManager":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise AgentRLError("the inference manager is not open", mend="use `async with InferenceManager(...)`")
        return self._session

    @property
    def log_path(self) -> Path:
        return home() / "logs" / self.config.run_id / f"{self.service_id}.log"

    async def start(self, folder: Path, version_id: str | None = None) -> None:
        """Launch the server on a model folder and wait until it takes calls.

        Raises AgentRLError with the server's last words when it dies at start.
        """
        self._folder = folder
        self.weight_version = version_id or UNPUBLISHED
        await self._launch()
        self._watcher = asyncio.create_task(self._watch())

    async def attach(self) -> None:
        """Use the server that the run's rollout process keeps, instead of starting one.

        Raises AgentRLError when no service of the run is ready.
        """
        alive = {"$gt": now() - timedelta(seconds=_SILENT_SECONDS)}
        found = await InferenceService.find(
            {"run_id": self.config.run_id, "status": {"$in": ["ready", "updating"]}, "heartbeat": alive}
        ).to_list()
        if not found:
            raise AgentRLError(
                f"no inference service of run {self.config.run_id} is ready",
                mend="start its rollout process: `agentrl sample --config FILE`",
            )
        service = max(found, key=lambda service: service.heartbeat)
        self.service_id, self.url, self.weight_version = service.id, service.url, service.weight_version
        self.ready.set()

    async def _launch(self) -> None:
        assert self._folder is not None
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = server_argv(self.config, self._folder, port, self.weight_version)
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
        self._tree = start_tree(argv, name=f"sglang-{self.config.run_id}", log_path=self.log_path, env=env, grace_s=8)
        await self._register("starting")
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while not await self._answers():
            if self._tree.poll() is not None:
                await self._register("down", "ended at start")
                raise AgentRLError(
                    f"SGLang ended at start on {self._folder}:\n{self._tree.last_lines(12)}",
                    mend=f"see {self.log_path}",
                )
            if asyncio.get_running_loop().time() > deadline:
                await asyncio.to_thread(self._tree.stop)
                await self._register("down", "not ready in time")
                raise AgentRLError(
                    f"SGLang was not ready after {_START_SECONDS:.0f} s on {self._folder}", mend=f"see {self.log_path}"
                )
            await asyncio.sleep(0.5)
        await self._register("ready")
        self.ready.set()

    async def _answers(self) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with self.session.get(f"{self.url}/model_info", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def generate(self, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """One call of /generate, made when the server is up.

        Raises ServerUnavailable when the server goes away or is given up, AgentRLError when it refuses the call.
        """
        await self.ready.wait()
        if self.failed is not None:
            raise ServerUnavailable(self.failed.what, mend=self.failed.mend)
        self.in_flight += 1
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self.session.post(f"{self.url}/generate", json=body, timeout=limit) as response:
                if response.status != 200:
                    reason = (await response.text())[:300]
                    if response.status in {429, 500, 502, 503}:
                        raise ServerUnavailable(f"the server at {self.url} answered {response.status}: {reason}")
                    raise AgentRLError(f"the server at {self.url} refused the call ({response.status}): {reason}")
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise ServerUnavailable(f"the server at {self.url} went away: {type(error).__name__}") from None
        except TimeoutError:
            raise ServerUnavailable(f"the server at {self.url} did not answer in {timeout:.0f} s") from None
        finally:
            self.in_flight -= 1

    async def update_weights(self, folder: Path, version_id: str) -> None:
        """Serve another version. On failure the old one goes on serving and AgentRLError says why."""
        async with self._changing:
            await self.ready.wait()
            if self.failed is not None:
                raise self.failed
            await self._register("updating")
            body = {"model_path": str(folder), "weight_version": version_id, "flush_cache": True}
            try:
                timeout = aiohttp.ClientTimeout(total=_UPDATE_SECONDS)
                async with self.session.post(
                    f"{self.url}/update_weights_from_disk", json=body, timeout=timeout
                ) as response:
                    answer = await response.json(content_type=None)
                    if response.status != 200 or not answer.get("success"):
                        await self._register("ready", f"{version_id} was refused")
                        raise AgentRLError(
                            f"the server still serves {self.weight_version}: {version_id} was refused: "
                            f"{str(answer.get('message', response.status))[:300]}",
                            mend=f"see {self.log_path}",
                        )
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ServerUnavailable(f"the weight update to {version_id} broke: {type(error).__name__}") from None
            self._folder, self.weight_version = folder, version_id
            await self._register("ready")

    async def _watch(self) -> None:
        """Heartbeat while the server lives; restart it with back-off when it dies."""
        assert self._tree is not None
        last = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if self._tree.poll() is None:
                if loop.time() - last > _HEARTBEAT_SECONDS:
                    last = loop.time()
                    await self._register()
                continue
            self.ready.clear()
            self.restarts += 1
            await self._register("down", f"ended with {self._tree.poll()}")
            print(f"SGLang ended with {self._tree.poll()}; restart {self.restarts}", file=sys.stderr, flush=True)
            try:
                if self.restarts > _RESTARTS:
                    raise AgentRLError(
                        f"SGLang died {self.restarts} times:\n{self._tree.last_lines(12)}", mend=f"see {self.log_path}"
                    )
                await asyncio.sleep(min(30.0, 2.0 ** (self.restarts - 1)))
                await self._restore_folder()
                await self._launch()
            except (AgentRLError, PyMongoError) as error:
                # Waiting callers must hear of it rather than wait for ever.
                self.failed = error if isinstance(error, AgentRLError) else AgentRLError(f"SGLang is down: {error}")
                self.ready.set()
                return

    async def _restore_folder(self) -> None:
        """The served version's files may have left the cache since; the object store has them."""
        version = await PolicyVersion.get(self.weight_version)
        if version is not None:
            self._folder = await asyncio.to_thread(fetch_version, version, self.store)

    async def _register(self, status: str | None = None, reason: str = "") -> None:
        """Tell the database how the service does; without a status only that it lives.

        A database that does not answer delays the news and ends nothing: sampling itself will notice it.
        """
        values = {
            "run_id": self.config.run_id,
            "url": self.url,
            "pid": self._tree.pid if self._tree else 0,
            "weight_version": self.weight_version,
            "in_flight": self.in_flight,
            "heartbeat": now(),
        }
        if status is not None:
            values |= {"status": status, "reason": reason}
        try:
            await InferenceService.get_pymongo_collection().update_one(
                {"_id": self.service_id}, {"$set": values, "$setOnInsert": {"created": now()}}, upsert=True
            )
        except PyMongoError as error:
            print(f"{self.service_id} is not registered: {str(error).split(',', 1)[0]}", file=sys.stderr, flush=True)

    async def stop(self) -> None:
        """Stop the server and say so in the database."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        if self._tree is not None:
            await asyncio.to_thread(self._tree.stop)
            await self._register("stopped")
            self._tree = None
        if self._session is not None:
            await self._session.close()
            self._session = None


def _free_port() -> int:
    """A port below the range that outgoing connections take: it is still free when the server binds it."""
    for port in random.sample(range(12000, 28000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AgentRLError("no free port between 12000 and 28000", mend="stop what holds them")


def output_of(answer: dict[str, Any]) -> tuple[list[int], list[float], list[dict[str, Any]], str]:
    """Ids, log-probabilities, weight spans and finish reason of an answer of /generate.

    Raises AgentRLError when the server's lists do not fit each other: such a call cannot be trained.
    """
    meta = answer["meta_info"]
    ids = [int(item) for item in answer["output_ids"]]
    pairs = meta.get("output_token_logprobs") or []
    if [int(item[1]) for item in pairs] != ids:
        raise AgentRLError(f"call {meta.get('id')}: {len(ids)} output ids do not match {len(pairs)} log-probabilities")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
    return ids, [float(item[0]) for item in pairs], spans, str(meta["finish_reason"]["type"])
