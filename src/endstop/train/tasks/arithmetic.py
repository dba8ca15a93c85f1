"""Arithmetic with the calculator: the model hands over at the end tag and goes on behind the result.

The model writes the expression, the runtime computes it. What must be learned is to put the right numbers
into the call, to stop twice (at the call's end and at the answer's), and to copy the result.
"""

from __future__ import annotations

from random import Random

from endstop.runtime.tools import calculate
from endstop.train.tasks.example import FINAL_MARK, Drawn, Part, calculated, text_part
from endstop.train.tasks.strings import Range

_QUESTIONS = ("what is {}?", "calculate {}", "compute {}", "{} = ?", "how much is {}?")


def _number(random: Random, digits: Range) -> int:
    count = random.randint(*digits)
    return random.randint(10 ** (count - 1) if count > 1 else 0, 10**count - 1)


def _value(expression: str) -> str:
    value = calculate(expression)
    assert value is not None, expression
    return value


def draw_calc(random: Random, digits: Range = (1, 3), terms: Range = (2, 2)) -> Drawn:
    """`what is 12+30?` -> a call with `12+30`, its result forced, `42`."""
    expression = str(_number(random, digits))
    for _ in range(random.randint(*terms) - 1):
        expression += random.choice("+-*") + str(_number(random, digits))
    result = _value(expression)
    prompt = random.choice(_QUESTIONS).format(expression)
    return Drawn(prompt, [*calculated(expression, result), text_part(result)])


NAMES = ("Ada", "Ben", "Eva", "Ian", "Kim", "Leo", "Mia", "Max", "Ann", "Tom", "Sue", "Jim")
THINGS = ("pens", "nuts", "cups", "keys", "maps", "eggs", "hats", "nails", "books", "coins")

# Each: the story, and the steps; in a step {r} is the result of the step before.
_ONE_STEP: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{n} has {a} {t} and gets {b} more. How many {t} now?", ("{a}+{b}",)),
    ("{n} has {a} {t} and {m} has {b}. How many {t} together?", ("{a}+{b}",)),
    ("{n} had {c} {t} and lost {b}. How many {t} are left?", ("{c}-{b}",)),
    ("{n} had {c} {t} and gave {b} to {m}. How many {t} are left?", ("{c}-{b}",)),
    ("{n} has {a} boxes of {d} {t}. How many {t} in all?", ("{a}*{d}",)),
    ("{n} buys {d} {t} for {a} cents each. How many cents?", ("{d}*{a}",)),
)
_TWO_STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{n} has {a} boxes of {d} {t} and finds {b} more. How many {t} in all?", ("{a}*{d}", "{r}+{b}")),
    ("{n} has {a} {t}, gets {b}, then loses {d}. How many {t} are left?", ("{a}+{b}", "{r}-{d}")),
    (
        "{n} has {a} {t} and {m} has {b}. They sell all for {d} cents each. How many cents?",
        ("{a}+{b}", "{r}*{d}"),
    ),
)


def draw_story(random: Random, digits: Range = (1, 2), two_steps: float = 0.3) -> Drawn:
    """A word problem with one call for each step; what stands behind `####` is the answer.

    digits: of the numbers in the story. two_steps: share of the problems that need a second call.
    """
    story, steps = random.choice(_TWO_STEPS if random.random() < two_steps else _ONE_STEP)
    name, other = random.sample(NAMES, 2)
    small, lost = random.randint(2, 9), _number(random, digits) + 1
    values = {
        "n": name,
        "m": other,
        "t": random.choice(THINGS),
        "a": _number(random, digits) + small,
        "b": lost,
        "c": lost + _number(random, digits),
        "d": small,
    }
    parts: list[Part] = []
    result = ""
    for step in steps:
        expression = step.format(**values, r=result)
        result = _value(expression)
        parts += calculated(expression, result)
    return Drawn(story.format(**values), [*parts, text_part(f"{FINAL_MARK} {result}")], final=True)
