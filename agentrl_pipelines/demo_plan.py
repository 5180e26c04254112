"""Which demo this is: a new number, or the unfinished one of the same kind and seed."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl_pipelines.demo_configs import addition_rl, addition_sft, chat_rl
from agentrl_pipelines.real_tasks import EASIER, TaskFiles, reasoning_gym_files, split_file
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import EvalReport, PolicyVersion, Run
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.runs import set_run_state

Kind = Literal["addition", "real"]

_PREFIX: dict[Kind, str] = {"addition": "demo", "real": "demo-real"}
_UNFINISHED = {"running", "paused"}


@dataclass(frozen=True)
class DemoOptions:
    seed: int = 0
    real: bool = False
    model: Path | None = None
    tasks: Path | None = None
    eval_tasks: Path | None = None

    @property
    def kind(self) -> Kind:
        return "real" if self.real else "addition"

    def check(self) -> None:
        if not self.real and (self.model or self.tasks or self.eval_tasks):
            raise AgentRLError("--model and --tasks belong to the real demo", mend="add --real, or leave them out")
        if self.eval_tasks and not self.tasks:
            raise AgentRLError("--eval-tasks needs --tasks", mend="name the training tasks too")
        if self.model and not (self.model / "config.json").is_file():
            raise AgentRLError(
                f"{self.model} is not a model folder: it has no config.json", mend="give a Hugging Face model folder"
            )


@dataclass(frozen=True)
class DemoPlan:
    run_id: str  # of the reinforcement run
    seed: int
    continued: bool
    #: (run id, its config when it is not there yet). The second run waits for the last version of the first.
    stages: list[tuple[str, Callable[[], AgentTrainingConfig]]]
    family: str | None  # the family of held-out tasks that decides, None: all of them


async def _number(options: DemoOptions) -> tuple[int, bool]:
    """(number, whether it is an unfinished demo to continue)."""
    form = re.compile(rf"{_PREFIX[options.kind]}-(\d+)(-sft)?")
    runs: dict[int, list[Run]] = {}
    for run in await Run.find_all().to_list():
        match = form.fullmatch(run.id)
        if match:
            runs.setdefault(int(match[1]), []).append(run)
    if not runs:
        return 1, False
    for number in sorted(runs, reverse=True):
        if all(_same(run, options) for run in runs[number]) and await _unfinished(runs[number], options):
            return number, True
    return max(runs) + 1, False


def _same(run: Run, options: DemoOptions) -> bool:
    config = run.config
    if config["seed"] != options.seed:
        return False
    if options.model and Path(config["model_name_or_path"]) != options.model.resolve():
        return False
    return not options.tasks or options.tasks.stem in Path(config["train_file"]).stem


async def _unfinished(runs: list[Run], options: DemoOptions) -> bool:
    """Something is under way, a stage was not begun, or the last version is not evaluated yet."""
    if any(run.state in {"failed", "stopped"} for run in runs):
        return False
    wanted = 1 if options.real else 2
    if len(runs) < wanted or any(run.state in _UNFINISHED for run in runs):
        return True
    last = await PolicyVersion.find_one({"run_id": max(runs, key=lambda run: run.created).id, "final": True})
    return last is not None and await EvalReport.find_one({"version_id": last.id}) is None


async def pause_other_demos(keep: set[str]) -> list[str]:
    """Unfinished demos that are not this one would be continued beside it: pause them."""
    paused = []
    for run in await Run.find(Run.state == "running").to_list():
        if run.id.startswith("demo-") and run.id not in keep:
            await set_run_state(run.id, "paused", "another demo was started")
            paused.append(run.id)
    return paused


async def plan_demo(options: DemoOptions, home: Path, say: Callable[[str], None]) -> DemoPlan:
    """Make model and task files where they are missing, and say what is to be run."""
    options.check()
    number, continued = await _number(options)
    run_id = f"{_PREFIX[options.kind]}-{number}"
    output = home / "output" / run_id
    if options.real:
        return _plan_real(options, run_id, continued, home, output, say)
    base = home / "models" / f"tiny-{options.seed}"
    if not (base / "config.json").is_file():
        say(f"making the tiny model of seed {options.seed}")
        _make_tiny(base, options.seed)
    sft = f"{run_id}-sft"
    return DemoPlan(
        run_id=run_id,
        seed=options.seed,
        continued=continued,
        stages=[
            (sft, lambda: addition_sft(sft, base, options.seed, output)),
            (run_id, lambda: addition_rl(run_id, f"{sft}.latest", base, options.seed, output)),
        ],
        family=None,
    )


def _make_tiny(base: Path, seed: int) -> None:
    """In a process of its own: torch is loaded, used once and gone with its memory."""
    import subprocess
    import sys

    base.parent.mkdir(parents=True, exist_ok=True)
    partial = base.with_name(f".{base.name}.partial")
    code = (
        "import sys, pathlib; from agentrl_runtime.training.tiny_model import make_tiny_model; "
        "make_tiny_model(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(partial), str(seed)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AgentRLError(
            f"the tiny model could not be made: {(done.stderr.strip().splitlines() or ['no message'])[-1]}",
            mend="run `agentrl doctor`",
        )
    partial.replace(base)


def _plan_real(
    options: DemoOptions, run_id: str, continued: bool, home: Path, output: Path, say: Callable[[str], None]
) -> DemoPlan:
    from agentrl_pipelines.real_model import NAME, prepare_real_model

    if options.model:
        model = options.model.resolve()
    else:
        say(f"preparing {NAME} (downloaded and converted once)")
        model = prepare_real_model(home)
    folder = home / "tasks"
    if options.tasks and options.eval_tasks:
        files = TaskFiles(options.tasks.resolve(), options.eval_tasks.resolve())
    elif options.tasks:
        files = split_file(options.tasks, folder)
    else:
        files = reasoning_gym_files(folder, options.seed)
    return DemoPlan(
        run_id=run_id,
        seed=options.seed,
        continued=continued,
        stages=[(run_id, lambda: chat_rl(run_id, model, files.train, files.evaluation, options.seed, output))],
        family=None if options.tasks else EASIER,
    )
