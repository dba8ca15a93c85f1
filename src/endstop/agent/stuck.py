"""Is the run going in circles? The same call with the same result, again and again, on one tree."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# What `bash` says of its time, which is never the same.
_SECONDS = re.compile(r", \d+\.\d s\]\Z")


class Circles:
    """Counts calls with their results since the tree last changed.

    A change of the tree starts the count anew, and a result that changes (polling) is another result. So a
    circle of several calls is found as well as one call repeated, and an agent that edits is never stuck.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._tree = ""
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def add(self, call: Mapping[str, Any], result: str, tree: str) -> bool:
        """Take a call; whether it is now one too many."""
        if tree != self._tree:
            self._tree = tree
            self._seen.clear()
        function = call["function"]
        key = (function["name"], _canonical(function["arguments"]), _SECONDS.sub("]", result))
        self._seen[key] += 1
        return self._seen[key] >= self.repeats

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, Any]], repeats: int) -> Circles:
        """The count after these messages of a trajectory."""
        circles = cls(repeats)
        calls: dict[str, Mapping[str, Any]] = {}
        for message in messages:
            for call in message.get("tool_calls") or ():
                calls[call["id"]] = call
            if message["role"] == "tool" and message["tool_call_id"] in calls:
                tree = message["meta"].get("tree", circles._tree)
                circles.add(calls[message["tool_call_id"]], message["content"], tree)
        return circles


def _canonical(arguments: str) -> str:
    """Arguments without the blanks and the order in which they were written."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
