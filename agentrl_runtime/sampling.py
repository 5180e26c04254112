"""The rollout process: `python -m agentrl_runtime.sampling --config FILE`."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl_runtime.configs import AgentTrainingConfig, load_config
from agentrl_runtime.errors import AgentRLError


def main(argv: Sequence[str] | None = None) -> int:
    """Sample for the run of the config until it is over. Exit code 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description="Sample trajectories for a run until its trainer ends it.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run's settings")
    options = parser.parse_args(argv)
    try:
        return asyncio.run(_main(load_config(options.config)))
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


async def _main(config: AgentTrainingConfig) -> int:
    from agentrl_runtime.rollout.math import QuestionSampler
    from agentrl_runtime.rollout.scheduler import SamplingScheduler

    working = asyncio.ensure_future(SamplingScheduler(config, QuestionSampler).main())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        print("stopped by a signal; what was under way is given back", flush=True)
    except BaseExceptionGroup as group:
        known = group.subgroup(AgentRLError)
        if known is None:
            raise
        raise _first(known) from group
    return 0


def _first(group: BaseExceptionGroup[AgentRLError]) -> AgentRLError:
    """The first of the errors that ended the loop's tasks together."""
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")


if __name__ == "__main__":
    sys.exit(main())
