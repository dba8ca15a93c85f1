"""Tasks on strings of letters: copying, spelling, repeating, the first items, copying until a letter."""

from __future__ import annotations

from random import Random

from endstop.train.tasks.example import Drawn
from endstop.train.tasks.words import LETTERS, letters

NONE = "none"
"""The answer where what is asked for does not exist."""

Range = tuple[int, int]


def draw_echo(random: Random, length: Range = (1, 9)) -> Drawn:
    """`say abc` -> `abc`: ends with its source."""
    word = letters(random, random.randint(*length))
    return Drawn(f"say {word}", word)


def draw_spell(random: Random, length: Range = (1, 8)) -> Drawn:
    """`spell abc` -> `a,b,c`."""
    word = letters(random, random.randint(*length))
    return Drawn(f"spell {word}", ",".join(word))


def draw_repeat(random: Random, times: Range = (1, 6), length: Range = (1, 3)) -> Drawn:
    """`repeat 3 xy` -> `xy xy xy`: ends when a counter has run down."""
    count, item = random.randint(*times), letters(random, random.randint(*length))
    return Drawn(f"repeat {count} {item}", " ".join([item] * count))


def draw_first(random: Random, items: Range = (2, 7), count: Range = (0, 7)) -> Drawn:
    """`first 2 of a b c` -> `a b`: ends before its source does; `first 0 of ...` is answered by nothing."""
    total = random.randint(*items)
    wanted = random.randint(count[0], min(count[1], total))
    source = random.sample(LETTERS, total)
    return Drawn(f"first {wanted} of {' '.join(source)}", " ".join(source[:wanted]))


def draw_until(random: Random, length: Range = (2, 9), absent: float = 0.1) -> Drawn:
    """`until k abkz` -> `abk`: ends where the content says so, while copying on would be easy.

    The place of the first hit is uniform, so that no length is a better guess than another. In a share
    `absent` of the instances the letter does not occur and the answer is `none`.
    """
    target = random.choice(LETTERS)
    others = LETTERS.replace(target, "")
    total = random.randint(*length)
    if random.random() < absent:
        return Drawn(f"until {target} {letters(random, total, others)}", NONE)
    hit = random.randrange(total)
    kept = letters(random, hit, others) + target
    # The letter comes again behind the first hit more often than chance would have it.
    rest = letters(random, total - hit - 1, LETTERS + 2 * target)
    return Drawn(f"until {target} {kept}{rest}", kept)
