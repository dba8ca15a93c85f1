"""Tasks with a checkable stopping point, and sources of training data made of them."""

from endstop.train.tasks.example import AnyTask, Example, SeveralTurns, Split, Task, split_of, visible
from endstop.train.tasks.registry import HARD, SYNTHETIC, registry, task_named
from endstop.train.tasks.sources import GeneratedCorpus, TaskExamples, TaskSource

__all__ = [
    "HARD",
    "SYNTHETIC",
    "AnyTask",
    "Example",
    "GeneratedCorpus",
    "SeveralTurns",
    "Split",
    "Task",
    "TaskExamples",
    "TaskSource",
    "registry",
    "split_of",
    "task_named",
    "visible",
]
