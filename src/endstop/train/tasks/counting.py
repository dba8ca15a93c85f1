"""Tasks that count: numbers in order, letters in a word with the count written down, lists of exactly N."""

from __future__ import annotations

from random import Random

from endstop.train.tasks.example import FINAL_MARK, Drawn, calculated, text_part
from endstop.train.tasks.strings import Range
from endstop.train.tasks.words import LETTERS, invented_word, letters

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": ("ant", "bear", "cat", "dog", "eel", "fox", "goat", "hen"),
    "colors": ("red", "blue", "green", "pink", "gray", "black", "white", "gold"),
    "days": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    "fruits": ("apple", "pear", "plum", "fig", "lime", "kiwi", "date", "mango"),
    "metals": ("iron", "zinc", "tin", "lead", "copper", "silver", "nickel"),
    "planets": ("mercury", "venus", "earth", "mars", "jupiter", "saturn", "uranus", "neptune"),
    "tools": ("saw", "axe", "file", "drill", "hammer", "pliers", "chisel", "level"),
    "trees": ("oak", "elm", "ash", "fir", "pine", "birch", "maple", "willow"),
}
_LIST_REQUESTS = (
    "list {} {}",
    "name {} {}",
    "give me {} {}",
    "exactly {} {}",
    "write down {} {}",
    "tell me {} {}",
)


def draw_count(random: Random, start: Range = (0, 99), numbers: Range = (1, 8)) -> Drawn:
    """`count 7 to 11` -> `7 8 9 10 11`: ends at a value."""
    first = random.randint(*start)
    last = first + random.randint(*numbers) - 1
    return Drawn(f"count {first} to {last}", " ".join(map(str, range(first, last + 1))))


def draw_count_on(random: Random, start: Range = (0, 99), numbers: int = 40) -> Drawn:
    """`count 7 on` -> `7 8 9 ...`: has no end. Only for measuring false stops."""
    first = random.randint(*start)
    return Drawn(f"count {first} on", " ".join(map(str, range(first, first + numbers))))


def draw_letters(random: Random, length: Range = (1, 8), different: Range = (2, 4)) -> Drawn:
    """`how many a in abca` -> `a1b1c1a2=2`: behind each letter the count so far, then the answer."""
    alphabet = "".join(random.sample(LETTERS, random.randint(*different)))
    word, target = letters(random, random.randint(*length), alphabet), alphabet[0]
    trace, count = _trace(word, target)
    return Drawn(f"how many {target} in {word}", f"{trace}={count}")


def _trace(word: str, target: str) -> tuple[str, int]:
    count, trace = 0, ""
    for letter in word:
        count += letter == target
        trace += f"{letter}{count}"
    return trace, count


def draw_bee(random: Random, syllables: Range = (1, 3), words: tuple[str, ...] = ()) -> Drawn:
    """Letters of a word counted by hand and checked with Python, after nanochat's SpellingBee.

    words: a word list; without one the words are invented. The letter is one of the word in three of four.
    """
    word = random.choice(words) if words else invented_word(random, random.randint(*syllables))
    target = random.choice(word) if random.random() < 0.75 else random.choice(LETTERS)
    trace, count = _trace(word, target)
    parts = [
        text_part(f"{trace}={count} "),
        *calculated(f"'{word}'.count('{target}')", str(word.count(target))),
        text_part(f"{FINAL_MARK} {count}"),
    ]
    return Drawn(f"How many {target} are in the word {word}?", parts, final=True)


def draw_list(random: Random, count: Range = (1, 7)) -> Drawn:
    """`list 3 trees` -> `oak, elm, ash`: ends after exactly that many; any different members are right."""
    category = random.choice(sorted(CATEGORIES))
    members = CATEGORIES[category]
    wanted = random.randint(count[0], min(count[1], len(members)))
    prompt = random.choice(_LIST_REQUESTS).format(wanted, category)
    return Drawn(prompt, ", ".join(members[:wanted]), members=frozenset(members))
