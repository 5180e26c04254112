"""Train: `torchrun -m agentrl_runtime.main --config FILE [--field value ...]`, or without torchrun for one process."""

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from agentrl_runtime.configs import AgentTrainingConfig, load_config, validated
from agentrl_runtime.errors import AgentRLError

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the run ended, or stopped where it can go on; 1 with what went wrong on stderr; 2 for usage."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = parse_arguments(sys.argv[1:] if argv is None else argv)
        _set_threads(config.world_size)
        _die_with_torchrun()
        # torch reads the thread count when it is imported.
        from agentrl_runtime.training.parallel import start_ranks, stop_ranks
        from agentrl_runtime.training.trainer import run_training

        ranks = start_ranks()
        try:
            run_training(config, ranks, stop=stop)
        finally:
            stop_ranks()
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def parse_arguments(argv: Sequence[str]) -> AgentTrainingConfig:
    """The config of `--config FILE` and flags for single fields, which win; either alone will do.

    Raises AgentRLError naming each wrong field; argparse exits with 2 for an unknown flag.
    """
    parser = argparse.ArgumentParser(prog="agentrl_runtime.main", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="YAML file with the config's fields")
    for name, field in AgentTrainingConfig.model_fields.items():
        flags = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
        parser.add_argument(*flags, dest=name, default=None, metavar="VALUE", help=field.description)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    overrides = {name: _value(text) for name, text in given.items() if text is not None}
    if path is None:
        return validated(overrides, where="command line")
    return load_config(path, overrides)


def _value(text: str) -> Any:
    """Mappings, lists and null are YAML; everything else is left to the field's own type."""
    return yaml.safe_load(text) if text[:1] in ("{", "[") or text == "null" else text


def _set_threads(world_size: int) -> None:
    """Half of the cores for the trainer, the rest for sampling; OMP_NUM_THREADS wins where it is set."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // (2 * world_size))))


def _die_with_torchrun() -> None:
    """A rank whose torchrun was killed outright must not go on and hold the run's lock."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
