"""The training loop: every rank carries out what rank 0's conductor says."""

import threading
from pathlib import Path

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.bridge import AsyncBridge
from agentrl_runtime.training.checkpoint import load_optimizer, read_state, restore_rng, save_checkpoint
from agentrl_runtime.training.conductor import Conductor
from agentrl_runtime.training.datasets import ConvertRecordToData, convert_record_to_data_func, training_sequences
from agentrl_runtime.training.learner import Learner, TrainingDiverged, load_policy
from agentrl_runtime.training.messages import End, Learn, Save, Start, receive, send_end
from agentrl_runtime.training.parallel import Ranks, wait_for_all
from agentrl_runtime.training.policies import OPTIMIZER_FILE, STATE_FILE


def run_training(
    config: AgentTrainingConfig,
    ranks: Ranks,
    *,
    stop: threading.Event,
    convert: ConvertRecordToData = convert_record_to_data_func,
) -> None:
    """Train the run of this config until it ends, is paused or stopped, or `stop` is set.

    All ranks call it. Raises AgentRLError for what a person must mend; a loss or gradient that is not finite
    has then set the run's state to failed.
    """
    if ranks.world != config.world_size:
        raise AgentRLError(
            f"{ranks.world} trainer processes were started, the config's world_size is {config.world_size}",
            mend="start as many as world_size says",
        )
    if not ranks.is_first:
        Trainer(config, ranks, None, convert).run()
        return
    with AsyncBridge() as bridge:
        try:
            conductor = Conductor(config, bridge, stop)
        except BaseException:
            send_end(ranks)
            raise
        Trainer(config, ranks, conductor, convert).run()


class Trainer:
    """One rank. `conductor` is rank 0's; every rank gets its messages and keeps the same learner."""

    def __init__(
        self, config: AgentTrainingConfig, ranks: Ranks, conductor: Conductor | None, convert: ConvertRecordToData
    ) -> None:
        self.config, self.ranks, self.conductor, self.convert = config, ranks, conductor, convert

    def run(self) -> None:
        messages = self.conductor.messages() if self.conductor else None
        message = receive(messages, self.ranks)
        if isinstance(message, End):
            return
        assert isinstance(message, Start)
        learner = self._load(message)
        source = Path(message.folder)
        while not isinstance(message := receive(messages, self.ranks), End):
            if isinstance(message, Learn):
                self._learn(learner, message)
            elif isinstance(message, Save):
                source = self._save(learner, message, source)

    def _load(self, message: Start) -> Learner:
        model, compute_dtype = load_policy(Path(message.folder), self.config)
        learner = Learner(model, self.config, self.ranks, compute_dtype=compute_dtype)
        state = None
        if message.resume is not None:
            load_optimizer(learner, Path(message.resume) / OPTIMIZER_FILE)
            state = read_state(Path(message.resume) / STATE_FILE)
            if self.conductor:
                self.conductor.resumed(state.optimizer_steps)
        restore_rng(state, self.ranks, self.config.seed)
        wait_for_all(self.ranks)  # rank 0 removes the files of `resume` next
        return learner

    def _learn(self, learner: Learner, message: Learn) -> None:
        sequences, left_out = training_sequences(
            message.rows,
            message.numbers,
            policy_version=message.version,
            max_policy_lag=self.config.max_policy_lag,
            convert=self.convert,
        )
        try:
            result = learner.step(sequences, number=message.step) if sequences else None
        except TrainingDiverged as error:
            if self.conductor is None:
                raise
            raise self.conductor.failed(message, error) from None
        if self.conductor:
            self.conductor.learned(message, sequences, left_out, result)

    def _save(self, learner: Learner, message: Save, source: Path) -> Path:
        """Rank 0 writes and publishes; the others give their shards. Returns where config and tokenizer are."""
        folder = self.conductor.work_folder() if self.conductor else None
        save_checkpoint(
            learner,
            folder,
            source=source,
            position=message.position,
            counts=(message.optimizer_steps, message.ledger_steps),
        )
        if self.conductor is None or folder is None:
            return source
        try:
            self.conductor.saved(message, folder)
        except BaseException:
            send_end(self.ranks)
            raise
        return self.conductor.model_folder
