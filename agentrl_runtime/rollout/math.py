"""Single-turn questions with a scorer: arithmetic, reasoning_gym, and any task file with answers."""

from agentrl_runtime.databases import Record
from agentrl_runtime.rollout.sampler import AsyncSampler
from agentrl_runtime.rollout.scorers import DEFAULT_SCORER, get_scorer


class QuestionSampler(AsyncSampler):
    """Asks the task's question once and scores the reply with the task's scorer."""

    reply = ""

    async def run(self) -> None:
        completion = await self.create_chat_completions(self.task.prompt_messages())
        self.reply = completion.choices[0].message.content or ""

    async def evaluate_record(self, record: Record) -> float:
        score = get_scorer(self.task.scorer or DEFAULT_SCORER)(self.task, self.reply)
        record.score_detail = score.detail
        return score.value
