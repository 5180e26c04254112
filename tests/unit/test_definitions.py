"""The code location: it loads, has no cycle, and stays light; dead Dagster runs are recognised."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from agentrl_pipelines import keepers, liveness, quality
from agentrl_pipelines.definitions import defs
from agentrl_pipelines.demo_configs import addition_rl, addition_sft, chat_rl
from agentrl_pipelines.liveness import FAILED_TAG, HOST_TAG, PID_TAG, STARTED_TAG, live_loop, loop_tags, process_tags
from agentrl_pipelines.loop import rollout_loop

ASSETS = {"task_dataset", "trajectories", "training_shard", "checkpoint", "eval_report", "served_policy"}


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    loaded = defs()
    assert isinstance(loaded, dg.Definitions)
    return loaded


def test_the_graph_has_every_asset_and_no_cycle(definitions: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(definitions)
    graph = definitions.resolve_asset_graph()
    order = [key.to_user_string() for key in graph.toposorted_asset_keys]
    assert set(order) == ASSETS
    chain = ["task_dataset", "trajectories", "training_shard", "checkpoint", "eval_report"]
    assert [name for name in order if name in chain] == chain


def test_every_check_belongs_to_its_asset(definitions: dg.Definitions) -> None:
    found = {(key.asset_key.to_user_string(), key.name) for key in definitions.resolve_asset_graph().asset_check_keys}
    assert found == {(check.asset, check.name) for check in quality.CHECKS}


def test_every_config_field_is_described(definitions: dg.Definitions) -> None:
    for asset in definitions.resolve_asset_graph().assets_defs:
        if not asset.is_executable or asset.node_def.config_schema is None:
            continue
        fields = getattr(asset.node_def.config_schema.config_type, "fields", {})
        assert all(field.description for field in fields.values()), asset.key


def test_loading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from agentrl_pipelines.definitions import defs; defs();"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_demo_recipes_are_valid(tmp_path: Any) -> None:
    configs = [
        addition_sft("demo-1-sft", tmp_path, 0, tmp_path),
        addition_rl("demo-1", "demo-1-sft.latest", tmp_path, 0, tmp_path),
        chat_rl("demo-real-1", tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl", 0, tmp_path),
    ]
    assert [config.stage for config in configs] == ["sft", "rl", "rl"]
    assert len({config.digest() for config in configs}) == 3


def _started_run(instance: dg.DagsterInstance, tags: dict[str, str]) -> str:
    run = instance.create_run_for_job(
        rollout_loop, run_config={"ops": {"rollout": {"config": {"run_id": "r-1"}}}}, tags=tags
    )
    instance.report_engine_event("started", run)
    instance.handle_new_event(
        dg.EventLogEntry(
            error_info=None,
            level="debug",
            user_message="",
            run_id=run.run_id,
            timestamp=datetime.now(UTC).timestamp(),
            dagster_event=dg.DagsterEvent(event_type_value="PIPELINE_START", job_name=run.job_name),
        )
    )
    return run.run_id


def _gone() -> dict[str, str]:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return {**process_tags(), PID_TAG: str(ended.pid), STARTED_TAG: "1.00"}


def test_a_live_loop_is_found_and_a_dead_one_is_failed() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        dead = _started_run(instance, loop_tags("r-1", "rollout") | _gone())
        assert live_loop(instance, "r-1", "rollout") is None
        found = instance.get_run_by_id(dead)
        assert found is not None and found.status == dg.DagsterRunStatus.FAILURE

        alive = _started_run(instance, loop_tags("r-1", "rollout") | process_tags())
        assert live_loop(instance, "r-1", "rollout") == alive
        assert live_loop(instance, "r-1", "training") is None
        assert live_loop(instance, "r-2", "rollout") is None


def test_on_another_host_the_lease_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(status=dg.DagsterRunStatus.STARTED, tags={HOST_TAG: "elsewhere", PID_TAG: "1"})
    record: Any = SimpleNamespace(dagster_run=run, update_timestamp=datetime.now(UTC) - timedelta(hours=1))

    class Anything:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(liveness, "database", Anything)
    for expired, dead in ((-5.0, False), (30.0, False), (500.0, True), (None, False)):
        monkeypatch.setattr(liveness, "lock_expired_for", lambda db, name, expired=expired: expired)
        assert (liveness.why_dead(record, "r-1", "training") is not None) is dead


class _Database:
    """Stands for the database of the keepers, which read it through state's functions only."""

    def __enter__(self) -> "_Database":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def two_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    created = datetime.now(UTC) - timedelta(hours=1)
    runs = [{"id": "r-1", "stage": "rl", "created": created}, {"id": "s-1", "stage": "sft", "created": created}]
    failed: list[tuple[str, str]] = []
    monkeypatch.setattr(keepers, "database", _Database)
    monkeypatch.setattr(
        keepers, "runs_needing", lambda db, role: [r for r in runs if role == "training" or r["stage"] == "rl"]
    )
    monkeypatch.setattr(keepers, "last_progress", lambda db, run: run["created"])
    monkeypatch.setattr(keepers, "fail_run", lambda db, run_id, reason: failed.append((run_id, reason)))
    return failed


def test_each_running_run_gets_one_loop(two_runs: list[tuple[str, str]]) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        rollouts = list(keepers.keep(instance, "rollout", "rollout"))
        trainings = list(keepers.keep(instance, "training", "training"))
        assert [request.tags[liveness.RUN_TAG] for request in rollouts if isinstance(request, dg.RunRequest)] == ["r-1"]
        assert [r.tags[liveness.RUN_TAG] for r in trainings if isinstance(r, dg.RunRequest)] == ["r-1", "s-1"]

        _started_run(instance, loop_tags("r-1", "rollout") | process_tags())
        assert list(keepers.keep(instance, "rollout", "rollout")) == []


def test_a_loop_that_keeps_failing_fails_its_run(two_runs: list[tuple[str, str]]) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(liveness.MAX_FAILURES):
            assert len(list(keepers.keep(instance, "rollout", "rollout"))) == 1
            run_id = _started_run(instance, loop_tags("r-1", "rollout") | process_tags() | {FAILED_TAG: "exit 1"})
            run = instance.get_run_by_id(run_id)
            assert run is not None
            instance.report_run_failed(run)
        assert list(keepers.keep(instance, "rollout", "rollout")) == []
        assert [run_id for run_id, _ in two_runs] == ["r-1"]


def test_killed_loops_do_not_count_as_failures(two_runs: list[tuple[str, str]]) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(liveness.MAX_FAILURES + 1):
            _started_run(instance, loop_tags("r-1", "rollout") | _gone())
            assert len(list(keepers.keep(instance, "rollout", "rollout"))) == 1
        assert two_runs == []
