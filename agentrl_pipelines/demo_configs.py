"""The recipes of the demos, each one config."""

from pathlib import Path

from agentrl_runtime.configs import AgentTrainingConfig

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def addition_sft(run_id: str, base: Path, seed: int, output_dir: Path) -> AgentTrainingConfig:
    """Learn 2-digit addition from a teacher that forgets most carries."""
    return AgentTrainingConfig(
        run_id=run_id,
        stage="sft",
        loss_calculater="CrossEntropy",
        model_name_or_path=str(base),
        processor_name=str(base),
        output_dir=output_dir,
        train_file=ASSETS / "addition_train.jsonl",
        eval_file=ASSETS / "addition_eval.jsonl",
        learning_rate=2e-3,
        warmup_steps=20,
        per_device_train_batch_size=64,
        num_train_epochs=100,
        max_steps=384,
        save_steps=96,
        max_tokens=128,
        seed=seed,
    )


def addition_rl(run_id: str, start: str, base: Path, seed: int, output_dir: Path) -> AgentTrainingConfig:
    """GRPO with exact-match reward from the policy version `start`."""
    return AgentTrainingConfig(
        run_id=run_id,
        stage="rl",
        loss_calculater="GRPO",
        model_name_or_path=start,
        processor_name=str(base),
        output_dir=output_dir,
        train_file=ASSETS / "addition_train.jsonl",
        eval_file=ASSETS / "addition_eval.jsonl",
        num_generations=4,
        prompts_per_batch=64,
        max_new_tokens=4,
        max_prompt_tokens=64,
        inf_context_length=128,
        target_concurrency=256,
        max_concurrent_samples_per_process=256,
        preferred_sampling_params={"temperature": 1.0},
        max_policy_lag=1,
        eval_every=20,
        learning_rate=5e-4,
        warmup_steps=10,
        epsilon=0.2,
        epsilon_higher=0.08,
        per_device_train_batch_size=256,
        max_steps=60,
        save_steps=1,
        num_train_epochs=100,
        max_tokens=128,
        seed=seed,
    )


def chat_rl(
    run_id: str, model: Path, train_file: Path, eval_file: Path, seed: int, output_dir: Path
) -> AgentTrainingConfig:
    """GRPO straight from a small chat model, on tasks that bring their own verifier."""
    return AgentTrainingConfig(
        run_id=run_id,
        stage="rl",
        loss_calculater="GRPO",
        model_name_or_path=str(model),
        output_dir=output_dir,
        train_file=train_file,
        eval_file=eval_file,
        num_generations=16,
        prompts_per_batch=8,
        max_new_tokens=8,
        max_prompt_tokens=256,
        inf_context_length=512,
        target_concurrency=128,
        max_concurrent_samples_per_process=128,
        preferred_sampling_params={"temperature": 1.0},
        max_policy_lag=1,
        eval_every=3,
        learning_rate=3e-5,
        warmup_steps=3,
        # A group of equal scores teaches nothing and costs as much time as any other.
        drop_zero_advantage=True,
        per_device_train_batch_size=128,
        max_steps=48,
        save_steps=4,  # a version of this model is 1.6 GB with its optimizer state
        num_train_epochs=100,
        max_tokens=512,
        microbatch_tokens=2048,
        seed=seed,
    )
