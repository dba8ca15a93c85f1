"""A generated dictionary: words whose syllables say what they mean, entries that end exactly there.

A word is one to three qualities and a thing, each a syllable of its own: `mokatu` is "a red small stone" if
`mo`, `ka` and `tu` are the syllables of red, small and stone. So an entry for a word never seen can be right,
and its length follows from the word.
"""

from __future__ import annotations

from random import Random

from endstop.train.tasks.example import Drawn
from endstop.train.tasks.strings import Range

QUALITIES = {
    "mo": "red", "ka": "small", "li": "tall", "du": "warm", "fe": "round", "so": "soft",
    "gi": "new", "pa": "long", "ru": "dark", "te": "thin", "vo": "cold", "zi": "loud",
}  # fmt: skip
THINGS = {
    "tun": "stone", "ber": "house", "lok": "river", "nas": "bird", "pim": "wheel", "rad": "tree",
    "sel": "boat", "gom": "lamp", "dif": "door", "kul": "song",
}  # fmt: skip


def dictionary_word(random: Random, qualities: Range = (1, 3)) -> tuple[str, str]:
    """A word and its definition."""
    first = random.sample(sorted(QUALITIES), random.randint(*qualities))
    last = random.choice(sorted(THINGS))
    meaning = " ".join([*(QUALITIES[syllable] for syllable in first), THINGS[last]])
    return "".join(first) + last, f"a {meaning}."


def draw_define(random: Random, qualities: Range = (1, 3)) -> Drawn:
    """`define mokatun` -> `a red small stone.`"""
    word, definition = dictionary_word(random, qualities)
    return Drawn(f"define {word}", definition)


def draw_entry(random: Random, qualities: Range = (1, 3)) -> Drawn:
    """The same as it stands in a dictionary, for base training: word, colon, definition."""
    word, definition = dictionary_word(random, qualities)
    return Drawn(f"define {word}", f"{word}: {definition}")
