"""Text of a model made safe and readable on a screen."""

from __future__ import annotations


def visible(text: str) -> str:
    """`text` on one line with everything readable: blanks as `␣`, line ends as `↵`, controls as `U+XXXX`."""
    marks = {" ": "␣", "\n": "↵", "\t": "⇥"}
    return "".join(marks.get(char) or readable(char) for char in text)


def readable(char: str) -> str:
    """`char`, or `⟨U+XXXX⟩` for what a terminal or a page would obey rather than show."""
    # Joiners hold emoji and Indic letters together and are harmless.
    return char if char.isprintable() or char in "\u200c\u200d" else f"⟨U+{ord(char):04X}⟩"
