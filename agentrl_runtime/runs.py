"""Runs: creating them, and reading and moving their state."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal

from pymongo.errors import DuplicateKeyError

from agentrl_runtime.configs import AgentTrainingConfig, validated
from agentrl_runtime.databases import Run, now
from agentrl_runtime.errors import AgentRLError

RunState = Literal["running", "paused", "finished", "failed", "stopped"]


@cache
def code_revision() -> str:
    """The git commit of the code, `+` when the tree differs from it; without git, a digest of the sources."""
    package = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=package, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", str(package)], cwd=package, capture_output=True, text=True
        ).stdout.strip()
        return commit + ("+" if changed else "")
    except (subprocess.CalledProcessError, FileNotFoundError):
        hasher = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            hasher.update(path.read_bytes())
        return f"src-{hasher.hexdigest()[:12]}"


async def ensure_run(config: AgentTrainingConfig) -> Run:
    """The run of this config, made when it is not there.

    Raises AgentRLError when a run of this name has another config: an experiment has one.
    """
    run = Run(
        id=config.run_id,
        config=config.public_dict(),
        config_digest=config.digest(),
        code_revision=code_revision(),
    )
    try:
        await run.insert()
        return run
    except DuplicateKeyError:
        found = await get_run(config.run_id)
    if found.config_digest != run.config_digest:
        changed = sorted(
            name for name in run.config.keys() | found.config.keys() if run.config.get(name) != found.config.get(name)
        )
        raise AgentRLError(
            f"run {config.run_id} exists with another config (differs in {', '.join(changed)})",
            mend="choose another run_id, or use the config that the run began with",
        )
    return found


async def get_run(run_id: str) -> Run:
    found = await Run.get(run_id)
    if found is None:
        raise AgentRLError(f"there is no run {run_id!r:.100}", mend="`agentrl lineage runs` lists them")
    return found


async def run_or_newest(run_id: str | None) -> Run:
    """The run of this id; without one, the run created last. Raises AgentRLError when there is none."""
    if run_id is not None:
        return await get_run(run_id)
    found = await Run.find_all().sort("-created").first_or_none()
    if found is None:
        raise AgentRLError("there is no run yet", mend="`make demo` makes one")
    return found


def config_of(run: Run) -> AgentTrainingConfig:
    return validated(run.config, where=f"config stored with run {run.id}")


async def set_run_state(run_id: str, state: RunState, reason: str = "") -> None:
    ended = now() if state in {"finished", "failed", "stopped"} else None
    await Run.get_pymongo_collection().update_one(
        {"_id": run_id}, {"$set": {"state": state, "reason": reason, "ended": ended}}
    )
