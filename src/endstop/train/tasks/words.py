"""Letters and words to make tasks from: invented ones, so that nothing has to be installed."""

from __future__ import annotations

from pathlib import Path
from random import Random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ONSETS = ("b", "br", "d", "f", "g", "gr", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ee", "oo")
_CODAS = ("", "", "", "l", "n", "r", "s", "t", "ll", "ss")


def letters(random: Random, length: int, alphabet: str = LETTERS) -> str:
    """A string of random letters."""
    return "".join(random.choices(alphabet, k=length))


def invented_word(random: Random, syllables: int) -> str:
    """A word that can be pronounced and that no dictionary has, or only by accident."""
    return "".join(
        random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS) for _ in range(syllables)
    )


def system_words(path: str | Path = "/usr/share/dict/words") -> tuple[str, ...]:
    """Lower-case words of 3 to 12 letters from a system's word list; () where there is none."""
    file = Path(path)
    if not file.is_file():
        return ()
    lines = file.read_text(encoding="utf-8", errors="ignore").split()
    return tuple(
        word
        for word in lines
        if word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 12
    )
