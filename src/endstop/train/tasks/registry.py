"""All tasks by name.

A name that ends in `-hard` is the same task with longer words, higher counts or larger numbers than the plain
one ever has: what is asked of reinforcement learning, and what measures how far lengths generalise.
"""

from __future__ import annotations

from endstop.protocol.errors import EndstopError
from endstop.train.tasks.arithmetic import draw_calc, draw_story
from endstop.train.tasks.brackets import draw_close
from endstop.train.tasks.counting import draw_bee, draw_count, draw_count_on, draw_letters, draw_list
from endstop.train.tasks.dictionary import draw_define, draw_entry
from endstop.train.tasks.example import AnyTask, SeveralTurns, Task
from endstop.train.tasks.gym import GymTask
from endstop.train.tasks.identity import draw_identity
from endstop.train.tasks.strings import draw_echo, draw_first, draw_repeat, draw_spell, draw_until

_echo = Task("echo", draw_echo, "the source is exhausted")
_spell = Task("spell", draw_spell, "the source is exhausted")
_repeat = Task("repeat", draw_repeat, "a counter has run down")
_first = Task("first", draw_first, "a counter has run down before the source is exhausted")
_until = Task("until", draw_until, "the content says so")
_count = Task("count", draw_count, "a value is reached")
_letters = Task("letters", draw_letters, "the trace is finished, then the answer")
_list = Task("list", draw_list, "a counter has run down")
_close = Task("close", draw_close, "the stack is empty")
_calc = Task("calc", draw_calc, "the call hands over, then the result is copied")
_story = Task("story", draw_story, "the steps are done, then the result is copied")
_define = Task("define", draw_define, "the word has no further syllable")
_identity = Task("identity", draw_identity, "the sentence is complete")
_bee = Task("bee", draw_bee, "the trace and the check are done, then the result is copied")

SYNTHETIC: tuple[AnyTask, ...] = (
    _echo,
    _spell,
    _repeat,
    _first,
    _first.with_knobs("empty", count=(0, 0)),
    _until,
    _until.with_knobs("absent", absent=1.0),
    _count,
    _letters,
    _list,
    _close,
    _calc,
    _story,
    _define,
    _identity,
    _bee,
    SeveralTurns(
        "turns", (_echo, _spell, _repeat, _first, _until, _count, _close, _calc, _define, _identity)
    ),
)
"""What the tiny preset learns and is judged by."""

HARD: tuple[Task, ...] = (
    _echo.with_knobs("echo-hard", length=(10, 14)),
    _spell.with_knobs("spell-hard", length=(9, 12)),
    _repeat.with_knobs("repeat-hard", times=(7, 9)),
    _first.with_knobs("first-hard", items=(8, 11), count=(4, 9)),
    _until.with_knobs("until-hard", length=(10, 14)),
    _count.with_knobs("count-hard", numbers=(9, 13)),
    _letters.with_knobs("letters-hard", length=(9, 12)),
    _close.with_knobs("close-hard", depth=(8, 11)),
    _calc.with_knobs("calc-hard", digits=(3, 4), terms=(3, 3)),
    _story.with_knobs("story-hard", digits=(3, 3)),
)

UNTIL_PRESENT = _until.with_knobs("until-present", absent=0.0)
"""The probe of a stop that the content decides, without the instances whose answer is `none`: to see that a
letter will not come is another skill, and it is learned later."""

COUNT_ON = Task("count-on", draw_count_on, "never: it has no end", ends=False)
ENTRY = Task("entry", draw_entry, "the word has no further syllable")

GYM: tuple[GymTask, ...] = (
    GymTask("gym-letter-counting", "letter_counting"),
    GymTask("gym-spell-backward", "spell_backward"),
    GymTask("gym-basic-arithmetic", "basic_arithmetic"),
    GymTask("gym-chain-sum", "chain_sum"),
    GymTask("gym-gsm-symbolic", "gsm_symbolic"),
    GymTask("gym-number-sequence", "number_sequence"),
    GymTask("gym-word-sorting", "word_sorting"),
)

registry: dict[str, AnyTask] = {
    task.name: task for task in (*SYNTHETIC, *HARD, UNTIL_PRESENT, COUNT_ON, ENTRY, *GYM)
}


def task_named(name: str) -> AnyTask:
    """The task of that name. Raises EndstopError for a name that is not in the registry."""
    if name not in registry:
        raise EndstopError(f"there is no task {name!r}; tasks are {', '.join(registry)}")
    return registry[name]
