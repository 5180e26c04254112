"""Starts the rollout process of a run as a process tree that its owner ends."""

import os
import sys
from pathlib import Path

from agentrl_runtime.processes import ProcessTree, start_tree

_GRACE_SECONDS = 25.0


def start_rollout(config_path: Path, log_path: Path) -> ProcessTree:
    """`python -m agentrl_runtime.sampling --config FILE` under a guardian; ends with this process."""
    return start_tree(
        [sys.executable, "-m", "agentrl_runtime.sampling", "--config", str(config_path)],
        name=f"rollout-{config_path.stem}",
        log_path=log_path,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        grace_s=_GRACE_SECONDS,
    )
