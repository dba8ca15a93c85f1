"""The checklist: items that the task names, evidence that the model attaches, and what the evidence is worth.

The harness owns the list. The model cannot tick an item off; it can name a test or a path, and the gate looks
whether that test passed in its own run, and whether that path is there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from endstop.agent.decisions import TestReport
from endstop.agent.task import ChecklistItem

ItemState = Literal["open", "attached", "proven", "unproven"]
# What may stand before a test's own name in its id: pytest and Rust, Go's subtests, dotted names, jest.
_BORDERS = ("::", "/", ".", " > ", "#")
_FILE_NAME = re.compile(r"[\w-][\w.-]*\.[A-Za-z]\w{0,9}\Z")


@dataclass(frozen=True, slots=True)
class ItemStatus:
    """Where an item stands. `attached` evidence has not been looked at on the tree in question."""

    id: str
    text: str
    state: ItemState
    evidence: str = ""
    why: str = ""

    @property
    def line(self) -> str:
        """For the model: `docs (write a README): unproven by README.md: there is no such path`."""
        name = f"{self.id} ({self.text})" if self.text else self.id
        by = f" by {self.evidence}" if self.evidence else ""
        return f"{name}: {self.state}{by}" + (f": {self.why}" if self.why else "")


class Checklist:
    """The items of a task. Evidence is a mapping from item ids to what the model wrote."""

    def __init__(self, items: Sequence[ChecklistItem]) -> None:
        self.items = tuple(items)

    def missing(self, evidence: Mapping[str, str]) -> tuple[str, ...]:
        """Items without evidence: the half of the check that needs no run."""
        return tuple(item.id for item in self.items if not evidence.get(item.id, "").strip())

    def unknown(self, evidence: Mapping[str, str]) -> tuple[str, ...]:
        """What evidence was attached to that is no item."""
        return tuple(sorted(evidence.keys() - {item.id for item in self.items}))

    def unproven(
        self,
        evidence: Mapping[str, str],
        report: TestReport | None,
        paths: Collection[str],
        commands: Collection[str] = (),
    ) -> dict[str, str]:
        """Items whose evidence does not hold, with the reason: the half after the gate's run.

        Args:
            report: of the gate's run. paths: of the tree it ran on. commands: that the gate itself ran.
        """
        found = {item.id: flaw(evidence.get(item.id, ""), report, paths, commands) for item in self.items}
        return {name: why for name, why in found.items() if why}

    def status(
        self, evidence: Mapping[str, str], unproven: Mapping[str, str] | None = None
    ) -> tuple[ItemStatus, ...]:
        """Every item. `unproven` None: nothing was looked at yet."""
        rows = []
        for item in self.items:
            text = evidence.get(item.id, "").strip()
            why = "" if unproven is None else unproven.get(item.id, "")
            state: ItemState = "attached" if unproven is None else "unproven" if why else "proven"
            rows.append(ItemStatus(item.id, item.text, state if text else "open", text, why))
        return tuple(rows)


def flaw(
    evidence: str, report: TestReport | None, paths: Collection[str], commands: Collection[str] = ()
) -> str:
    """Why this evidence does not prove its item; empty where it does.

    Something that can be checked has to hold: a test passed, a path is there, or it is the gate's own
    command, which has just passed. Any other command is recorded and proves nothing, whatever it is said to
    have printed. A test or path that is named and does not hold is a flaw even beside one that does.
    """
    text = " ".join(evidence.split())
    if not text:
        return "there is no evidence"
    if text in {" ".join(command.split()) for command in commands}:
        return ""
    whole = _test_flaw(text, report)
    if whole is not None:
        return whole
    proven = False
    for part in re.split(r"[,;\n]", evidence):
        name = " ".join(part.split()).strip("\"'`")
        words = [word.strip("\"'`()").rstrip(".:") for word in name.split()]
        # Test names of some runners have blanks in them, so a part is looked up whole, then word by word. A
        # plain word of a sentence ("tests", "docs") names nothing, though there may be a folder of that name.
        named = [name] if len(words) < 2 or _test_flaw(name, report) is not None else _names(words)
        only_names = len(named) == len(words)
        for word in filter(None, named):
            test = _test_flaw(word, report)
            path = _path_of(word)
            if test:
                return test
            if test == "" or ("::" not in word and _exists(path, paths)):
                proven = True
            elif "::" in word:
                return f"no test {word} ran"
            elif _FILE_NAME.match(path.rpartition("/")[2]) and (only_names or "/" in path):
                return f"there is no path {path}"
    return "" if proven else "it names neither a test that passed nor a path that is there"


def _names(words: Sequence[str]) -> list[str]:
    return [word for word in words if any(mark in word for mark in ("_", "/", ".", "::", "["))]


def _test_flaw(name: str, report: TestReport | None) -> str | None:
    """None where no test of that name is in the report, empty where all of that name passed."""
    if report is None:
        return None
    for verb, tests in (("failed", report.failed), ("was skipped", report.skipped)):
        named = next((test for test in sorted(tests) if _is_named(name, test)), None)
        if named is not None:
            return f"the test {named} {verb}"
    return "" if any(_is_named(name, test) for test in report.passed) else None


def _is_named(name: str, test: str) -> bool:
    """Whether a test's id is this name, or ends with it; a parametrised test is named with or without its
    parameters. A runner that works further in tells the end of what it is called from the top."""
    bare = test.partition("[")[0] if test.endswith("]") else test
    return any(
        candidate == name
        or candidate.endswith(tuple(border + name for border in _BORDERS))
        or ("::" in candidate and name.endswith("/" + candidate))
        for candidate in (test, bare)
    )


def _path_of(word: str) -> str:
    path = word.replace("\\", "/").removeprefix("/workspace/")
    while path.startswith("./"):
        path = path[2:]
    return re.sub(r"(:\d+)+\Z", "", path).rstrip("/")


def _exists(path: str, paths: Collection[str]) -> bool:
    return bool(path) and (path in paths or any(known.startswith(path + "/") for known in paths))
