"""A model opened for a verb, and one answer streamed so that Ctrl-C ends the answer, not the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endstop.cli.exits import check_interrupted
from endstop.cli.inputs import read_file
from endstop.cli.options import check_sampling, model_options
from endstop.cli.output import counted, note
from endstop.cli.progress import downloading

if TYPE_CHECKING:
    from endstop.runtime.llm import LLM
    from endstop.runtime.results import CompletionOutput
    from endstop.view.document import TraceDocument

REQUEST_ID = "answer"


@dataclass(slots=True)
class Session:
    """An LLM with the directory it was loaded from, which is where the sampling preset comes from."""

    llm: LLM
    directory: Path
    name: str

    @property
    def calls_in_stream(self) -> bool:
        """The runtime answers calls that the model writes between its words."""
        return self.llm.engine.make_tool is not None

    def content_of(self, output: CompletionOutput) -> str | list[dict[str, str]]:
        """An answer as the history has it: in parts where it holds calls, so that their tags are tokens."""
        from endstop.protocol.stream_parts import StreamTags, stream_parts

        engine = self.llm.engine
        if self.calls_in_stream and engine.chat_format is not None:
            added = engine.chat_format.tokenizer.added_tokens
            tags = StreamTags.of({token.content: token_id for token_id, token in added.items()})
            if tags is not None and tags.call_start in output.generated_token_ids:
                return stream_parts(output.generated_token_ids, engine.pieces, tags)
        return output.text if output.content is None else output.content


@contextmanager
def open_model(
    name: str, model: Mapping[str, Any], sampling: Mapping[str, Any], template: Path | None = None
) -> Iterator[Session]:
    """Resolve, fetch and load a model. Flags that are wrong in themselves are refused before that."""
    check_sampling(dict(sampling))
    options = model_options(dict(model))
    text = None if template is None else read_file(template)
    from endstop.models.gguf import ensure_directory
    from endstop.protocol.resolve import resolve_model

    source = {key: options.pop(key) for key in ("revision", "offline") if key in options}
    with downloading() as progress:
        resolved = resolve_model(name, progress=progress, **source)
    directory = ensure_directory(resolved)
    if not sys.stderr.isatty():
        # transformers draws bars into logs otherwise.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from endstop.runtime.llm import LLM

    with LLM(directory, chat_template=text, **options) as llm:
        check_interrupted()
        yield Session(llm, directory, name)


def require_template(session: Session, otherwise: str) -> None:
    """Raise MissingTemplate where there is no chat template; `otherwise` is the other way out."""
    from endstop.protocol.errors import MissingTemplate

    if session.llm.engine.chat_format is None:
        raise MissingTemplate(
            f"{session.name} has no chat template: give one with --template FILE, or {otherwise}."
        )


@dataclass(slots=True)
class Answer:
    """A finished answer and how long it took. Seconds are wall-clock, the prompt's prefill included."""

    output: CompletionOutput
    prompt_tokens: int
    prompt_text: str
    seconds: float
    first_seconds: float
    interrupted: bool

    @property
    def tokens_per_second(self) -> float:
        return len(self.output.generated_token_ids) / max(self.seconds, 1e-9)


def stream_answer(
    session: Session,
    prompt: str | Sequence[Mapping[str, Any]],
    params: Any,
    show: Callable[[str], None] = lambda text: None,
    show_reasoning: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Answer:
    """Stream one answer to `show`. A first Ctrl-C ends it with what is there, a second one the process."""
    engine = session.llm.engine
    started = time.monotonic()
    first: float | None = None
    prompts: list[Any] = []
    with aborted_by_interrupt(session.llm) as pressed:
        deltas = session.llm.stream(
            prompt, params, request_id=REQUEST_ID, on_output=prompts.append, **options
        )
        output = None
        for delta in deltas:
            if first is None:
                first = time.monotonic()
            show(delta.text if isinstance(prompt, str) else delta.content)
            show_reasoning(delta.reasoning)
            output = delta.output or output
        assert output is not None, "the last delta of a stream carries the output"
    seconds = time.monotonic() - started
    ids = prompts[0].prompt_token_ids
    text = engine.pieces.join(ids).decode("utf-8", "replace")
    return Answer(output, len(ids), text, seconds, (first or started) - started, pressed.is_set())


@contextmanager
def aborted_by_interrupt(llm: LLM) -> Iterator[threading.Event]:
    """Turn the first SIGINT into a cancelled request; the event says whether it came."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def interrupt(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        # Not from the handler itself: it may have interrupted the main thread inside a lock.
        threading.Thread(target=llm.abort, args=(REQUEST_ID,), daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def trace_document(session: Session, answer: Answer, params: Any) -> TraceDocument:
    """What the views show of an answer that was generated with `trace=True`."""
    from endstop.view.document import TraceDocument, completed_texts, set_params

    pieces, output = session.llm.engine.pieces, answer.output
    assert output.trace is not None, "the answer was generated with trace=True"
    ids = [step.token_id for step in output.trace.steps]
    stops = session.llm.engine.stops
    return TraceDocument(
        output.trace,
        completed_texts(ids, [pieces[token_id] for token_id in ids]),
        output.text,
        session.name,
        answer.prompt_text,
        output.finish_reason,
        output.stop_kind,
        output.stop_reason,
        answer.tokens_per_second,
        set_params(params),
        {token_id: pieces[token_id].decode("utf-8", "replace") for token_id in stops.ids},
    )


def note_statistics(session: Session, answer: Answer) -> None:
    """How it ended, P(stop) along the answer and the speed, on stderr."""
    import shutil

    from endstop.view.marks import visible
    from endstop.view.sparkline import captioned_sparkline

    output = answer.output
    reason = output.stop_reason
    spelled = ""
    if isinstance(reason, int):
        spelled = f" {visible(session.llm.engine.pieces[reason].decode('utf-8', 'replace'))}"
    shown = "none" if reason is None else visible(str(reason))
    note(f"finish_reason {output.finish_reason}, stop_kind {output.stop_kind}, stop_reason {shown}{spelled}")
    if output.trace is not None:
        width = min(80, max(10, shutil.get_terminal_size().columns - 52))
        values = [step.p_stop for step in output.trace.steps]
        note(captioned_sparkline(values, width, sys.stderr.encoding or "ascii"))
    written = counted(len(output.generated_token_ids), "token")
    note(
        f"{written} in {answer.seconds:.2f} s, {answer.tokens_per_second:.1f} tokens per second, "
        f"first after {answer.first_seconds:.2f} s; prompt {counted(answer.prompt_tokens, 'token')}"
    )
