"""Tasks by the names that people give: single ones, data sets, and groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from endstop.protocol.errors import EndstopError
from endstop.train.evaluation.chat_tasks import ChatTask, generated_task
from endstop.train.evaluation.datasets import EVALUATED, dataset_task
from endstop.train.tasks import HARD, SYNTHETIC, registry

GROUPS: dict[str, tuple[str, ...]] = {
    "synthetic": (*(task.name for task in SYNTHETIC), "count-on"),
    "hard": tuple(task.name for task in HARD),
    "chatcore": EVALUATED,
}
"""`chatcore` are the five of nanochat's ChatCORE."""
_OTHER_NAMES = {"spelling-bee": "bee", "spellingbee": "bee", "human-eval": "humaneval"}


def tasks_named(
    names: Sequence[str],
    *,
    examples: int = 100,
    seed: int = 0,
    split: str = "test",
    place: str | Path | None = None,
    offline: bool | None = None,
) -> list[ChatTask]:
    """The tasks of these names, each once, in their order.

    Args:
        names: of generated tasks, of data sets, or of GROUPS; case, `_` and `-` do not matter.
        examples: how many a generated task makes. seed: which ones.
        split: of the data sets. place, offline: see `dataset_rows`.

    Raises EndstopError for an unknown name, and where a data set cannot be had.
    """
    wanted: list[str] = []
    for name in names:
        plain = name.strip().lower().replace("_", "-")
        plain = _OTHER_NAMES.get(plain, plain)
        for single in GROUPS.get(plain, (plain,)):
            if single not in registry and single not in EVALUATED:
                raise EndstopError(
                    f"there is no task {name.strip()!r}; tasks are {', '.join(GROUPS)}, "
                    f"{', '.join(EVALUATED)}, {', '.join(registry)}."
                )
            if single not in wanted:
                wanted.append(single)
    return [
        dataset_task(name, split, place, offline=offline)
        if name in EVALUATED
        else generated_task(registry[name], seed=seed, size=examples)
        for name in wanted
    ]
