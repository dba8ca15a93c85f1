"""Reading prompts and running them through one engine, results in the order of the prompts."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from endstop.cli.inputs import lines, read_file, read_stdin
from endstop.cli.output import counted, note
from endstop.cli.progress import bars
from endstop.cli.results import result_dict
from endstop.protocol.errors import EndstopError
from endstop.protocol.params import FIELD_NAMES

if TYPE_CHECKING:
    from endstop.cli.session import Session
    from endstop.protocol.params import SamplingParams
    from endstop.runtime.results import RequestOutput

# Requests handed to the engine ahead of those that are running, so that a file of any length fits.
_AHEAD = 128

Item = str | Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class BatchReport:
    """What a run did.

    failed: prompts with an error instead of a result. empty: texts (no conversations) that the model took for
    a finished turn, so that its first token is a terminator.
    """

    finished: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    empty: int = 0


def read_prompts(
    arguments: Sequence[str] | None,
    file: Path | None,
    jsonl: bool,
    stdin: TextIO,
    *,
    chat: bool = False,
    system: str | None = None,
) -> list[Item]:
    """Prompts as texts, or conversations where `chat` or a line's `messages` says so."""
    if arguments:
        items: list[Item] = list(arguments)
    else:
        if file is None and stdin.isatty():
            note("Prompts, a line each; Ctrl-D ends.")
        name = "stdin" if file is None else str(file)
        text = read_stdin(stdin) if file is None else read_file(file)
        as_json = jsonl or (file is not None and file.suffix in (".jsonl", ".ndjson"))
        items = [_parsed(name, number, line) if as_json else line for number, line in lines(text)]
    if not items:
        raise EndstopError("there is no prompt: give one as an argument, in --file or on stdin.")
    if not chat:
        return items
    before = [{"role": "system", "content": system}] if system is not None else []
    return [[*before, {"role": "user", "content": item}] if isinstance(item, str) else item for item in items]


def _parsed(name: str, number: int, line: str) -> Item:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise EndstopError(f"{name}, line {number} is not valid JSON: {error}.") from None
    prompt, messages = value, None
    if isinstance(value, dict):
        ignored = sorted(FIELD_NAMES & value.keys())
        if ignored:
            raise EndstopError(
                f"{name}, line {number} sets {', '.join(ignored)}: parameters hold for all prompts of a run, "
                "give them as flags."
            )
        prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str) and messages is None:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        if prompt is None:
            return messages
        raise EndstopError(f"{name}, line {number} has both prompt and messages.")
    raise EndstopError(
        f"{name}, line {number} must be a text, or an object with a text as `prompt` or a list of "
        "messages as `messages`."
    )


def run_batch(session: Session, items: list[Item], params: SamplingParams, stream: TextIO) -> BatchReport:
    """Run all prompts; a line for each goes to `stream` as soon as those before it are out.

    On the first Ctrl-C what runs is ended and written with what it has, and the rest is left out.
    """
    report = BatchReport()
    started = time.monotonic()
    done: dict[int, dict[str, Any]] = {}
    engine = session.llm.engine
    written = given = 0
    running: set[str] = set()

    def finish(index: int, result: RequestOutput) -> None:
        done[index] = result_dict(index, result)
        running.discard(result.request_id)
        report.finished += 1
        report.tokens += result.usage.completion_tokens
        first = result.outputs[0].generated_token_ids[:1]
        report.empty += isinstance(items[index], str) and first != [] and first[0] in engine.stops.ids

    with _progress(len(items), report) as show, _interruptible() as pressed:
        while written < len(items):
            if pressed.is_set() and not report.interrupted:
                report.interrupted = True
                for request_id in list(running):
                    engine.abort(request_id)
            while not report.interrupted and given < len(items) and len(running) < _AHEAD:
                index = given
                given += 1
                try:
                    running.add(_add(session, index, items[index], params, finish))
                except (EndstopError, ValueError) as error:
                    done[index] = {"index": index, "error": str(error)}
                    report.failed += 1
            if running:
                engine.step()
            while written in done:
                stream.write(json.dumps(done.pop(written), ensure_ascii=False) + "\n")
                written += 1
            stream.flush()
            show()
            if report.interrupted and not running:
                break
    report.seconds = time.monotonic() - started
    rate = report.tokens / max(report.seconds, 1e-9)
    failed = f", {report.failed} refused" if report.failed else ""
    left = f", {len(items) - written} left out" if written < len(items) else ""
    note(
        f"{report.finished} of {counted(len(items), 'prompt')}{failed}{left}: "
        f"{counted(report.tokens, 'token')} in {report.seconds:.1f} s, {rate:.1f} tokens per second"
    )
    if report.empty and engine.chat_format is not None:
        note(
            f"endstop: for {counted(report.empty, 'prompt')} the first token is already a terminator: "
            "without its template the model takes a prompt for a finished turn; try --chat."
        )
    return report


def _add(session: Session, index: int, item: Item, params: SamplingParams, finish: Any) -> str:
    engine = session.llm.engine
    options: dict[str, Any] = {
        "request_id": f"prompt-{index}",
        "on_output": lambda result: finish(index, result),
    }
    if isinstance(item, str):
        return engine.add(item, params, **options)
    return engine.add_chat(item, params, **options)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first SIGINT sets the event, the second one raises."""
    pressed = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(total: int, report: BatchReport) -> Iterator[Any]:
    """A bar with the rate and the time left, where a person looks at stderr."""
    if not sys.stderr.isatty() or total == 1:
        yield lambda: None
        return
    started = time.monotonic()
    with bars(transient=True) as progress:
        task = progress.add_task("generating", total=total)

        def show() -> None:
            rate = report.tokens / max(time.monotonic() - started, 1e-9)
            progress.update(
                task, completed=report.finished + report.failed, description=f"{rate:.0f} tokens/s"
            )

        yield show
