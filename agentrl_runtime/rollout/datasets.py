"""Datasets that a scheduler samples from: sequences of `Task`."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from agentrl_runtime import ids
from agentrl_runtime.databases import Task, TaskDataset, insert_new
from agentrl_runtime.errors import AgentRLError


class SizedTasks(Protocol):
    """What a dataset has to offer; torch's map-style Dataset fits."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


async def store_tasks(dataset: SizedTasks, name: str) -> None:
    """Insert the tasks of a dataset under this name; tasks that are there already are left as they are.

    Raises AgentRLError when an item is no Task.
    """
    tasks: list[Task] = []
    for index in range(len(dataset)):
        task = dataset[index]
        if not isinstance(task, Task):
            raise AgentRLError(f"item {index} of dataset {name} is {type(task).__name__}, no Task")
        content = task.model_dump_json(exclude={"id", "dataset", "line", "created"})
        task.dataset, task.line = name, index + 1
        task.id = task.id or ids.derived_id("task_", name, content)
        tasks.append(task)
    for group in _by_class(tasks):
        await insert_new(type(group[0]), group)
    if await TaskDataset.get(name) is None:
        await TaskDataset(id=name, file="", sha256="", tasks=len(tasks)).insert()


def _by_class(tasks: Sequence[Task]) -> Iterable[list[Task]]:
    groups: dict[type[Task], list[Task]] = {}
    for task in tasks:
        groups.setdefault(type(task), []).append(task)
    return groups.values()
