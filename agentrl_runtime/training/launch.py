"""Start a trainer as a process tree of its own."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl_runtime.processes import ProcessTree, start_tree

#: A trainer that is told to stop finishes its step and commits; that may take this long.
STOP_GRACE_SECONDS = 60.0


def trainer_command(config_path: Path, *, world_size: int, arguments: Sequence[str] = ()) -> list[str]:
    """The command line; a single process needs no torchrun, whose agent would only import torch once more."""
    entry = ["-m", "agentrl_runtime.main", "--config", str(config_path), *arguments]
    if world_size == 1:
        return [sys.executable, *entry]
    torchrun = ["-m", "agentrl_runtime.training.launch", "--standalone", "--nproc-per-node", str(world_size)]
    return [sys.executable, *torchrun, *entry]


def start_trainer(config_path: Path, *, world_size: int, log_path: Path, arguments: Sequence[str] = ()) -> ProcessTree:
    """Start training the run of a config file; `arguments` are further flags of agentrl_runtime.main.

    `.stop()` lets it finish its step and commit. The tree ends with this process.
    """
    return start_tree(
        trainer_command(config_path, world_size=world_size, arguments=arguments),
        name="trainer",
        log_path=log_path,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        grace_s=STOP_GRACE_SECONDS,
    )


def main() -> int:
    """torchrun with exit codes as those of one process: 0 after a stop in order, 1 when a rank failed.

    torchrun itself answers SIGTERM with a traceback and 1, though the ranks (which have half a minute) commit.
    What went wrong in a rank is on stderr already.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException:
        return 0
    except ChildFailedError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
