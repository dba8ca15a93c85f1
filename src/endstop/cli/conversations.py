"""Conversations from files and flags, and stored renders that are compared byte for byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from endstop.cli.inputs import lines, read_file, read_stdin
from endstop.cli.output import whole_file
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer, Rendered

RENDERS_VERSION = 1
# Options of a stored render that go to the renderer under their own names.
_OPTIONS = ("tools", "documents", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation and how it is to be rendered."""

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    variables: Mapping[str, Any]
    now: datetime | None = None

    def render(self, renderer: ChatRenderer) -> Rendered:
        return renderer.render(self.messages, now=self.now, **self.options, **self.variables)


def read_conversations(
    file: Path | None, flags: Sequence[str] | None, stdin: TextIO
) -> list[list[dict[str, Any]]]:
    """Conversations from `-m role:text` flags, a JSON or JSONL file, or stdin for `-`."""
    if flags:
        if file is not None:
            raise EndstopError("messages come either from -m or from a file, not from both.")
        return [[_message(flag) for flag in flags]]
    if file is None:
        raise EndstopError("there is no message: give -m ROLE:TEXT, or a file with messages.")
    name = "stdin" if str(file) == "-" else str(file)
    text = read_stdin(stdin) if str(file) == "-" else read_file(file)
    try:
        return [_conversation(name, json.loads(text))]
    except ValueError as whole:
        numbered = lines(text)
        if len(numbered) < 2:
            raise EndstopError(f"{name} is not valid JSON: {whole}.") from None
    found = []
    for number, line in numbered:
        try:
            found.append(_conversation(f"{name}, line {number}", json.loads(line)))
        except ValueError as error:
            raise EndstopError(f"{name}, line {number} is not valid JSON: {error}.") from None
    return found


def _message(flag: str) -> dict[str, Any]:
    role, separator, content = flag.partition(":")
    if not separator or not role:
        raise EndstopError(f"-m takes ROLE:TEXT such as user:Hi, got {flag!r}.")
    return {"role": role, "content": content}


def _conversation(name: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise EndstopError(f"{name} must hold a list of messages, or an object with `messages`.")
    return value


def template_variables(flags: Sequence[str]) -> dict[str, Any]:
    """`enable_thinking=false` and so on; what is no JSON is text."""
    variables: dict[str, Any] = {}
    for flag in flags:
        name, separator, text = flag.partition("=")
        if not separator or not name:
            raise EndstopError(f"--var takes NAME=JSON, got {flag!r}.")
        try:
            variables[name] = json.loads(text)
        except ValueError:
            variables[name] = text
    return variables


def save_renders(
    path: Path, model: str, renderer: ChatRenderer, jobs: Sequence[Job], renders: Sequence[Rendered]
) -> None:
    """Store renders with all that is needed to make them again."""
    entries = [
        {
            "messages": list(job.messages),
            **job.options,
            "variables": dict(job.variables),
            "now": None if job.now is None else job.now.isoformat(),
            "text": rendered.text,
            "ids": list(rendered.ids),
        }
        for job, rendered in zip(jobs, renders, strict=True)
    ]
    template = renderer.template_for(None).encode("utf-8")
    content = {
        "version": RENDERS_VERSION,
        "model": model,
        "template_sha256": hashlib.sha256(template).hexdigest(),
        "renders": entries,
    }
    with whole_file(path) as place:
        place.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def check_renders(path: Path, renderer: ChatRenderer) -> tuple[list[str], int]:
    """A sentence for each stored render that comes out differently here, and how many there are in all."""
    try:
        content = json.loads(read_file(path))
        if content["version"] != RENDERS_VERSION:
            raise EndstopError(
                f"{path} has version {content['version']!r}, this endstop reads {RENDERS_VERSION}."
            )
        jobs = [(_stored(entry), str(entry["text"]), list(entry["ids"])) for entry in content["renders"]]
    except json.JSONDecodeError as error:
        raise EndstopError(f"{path} is not valid JSON: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EndstopError(f"{path} cannot be read as stored renders: {error!r}.") from error
    differences = []
    for number, (job, text, ids) in enumerate(jobs, start=1):
        try:
            rendered = job.render(renderer)
        except EndstopError as error:
            differences.append(f"render {number}: refused here: {error}")
            continue
        difference = _difference(text, ids, rendered)
        if difference is not None:
            differences.append(f"render {number}: {difference}")
    return differences, len(jobs)


def _stored(entry: Mapping[str, Any]) -> Job:
    options = {name: entry[name] for name in _OPTIONS if name in entry}
    now = entry.get("now")
    return Job(
        entry["messages"],
        options,
        entry.get("variables") or {},
        None if now is None else datetime.fromisoformat(now),
    )


def _difference(text: str, ids: list[int], rendered: Rendered) -> str | None:
    stored, here = text.encode("utf-8", "surrogatepass"), rendered.text.encode("utf-8", "surrogatepass")
    if stored != here:
        place = _first_difference(stored, here)
        cut = slice(place, place + 24)
        return f"text differs at byte {place}: stored {stored[cut]!r}, here {here[cut]!r}"
    if ids != list(rendered.ids):
        place = _first_difference(ids, rendered.ids)
        cut = slice(place, place + 8)
        return f"ids differ at token {place}: stored {ids[cut]}, here {rendered.ids[cut]}"
    return None


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
