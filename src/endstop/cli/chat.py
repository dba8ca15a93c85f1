"""`endstop chat`: talk to a model, or ask it one thing."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.exits import INTERRUPTED
from endstop.cli.options import MODEL, SAMPLING, ModelArgument, sampling_params
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from endstop.cli.session import Answer, Session

app = verb_app()

# One word behind a slash is meant as a command; a path or a sentence goes to the model.
_COMMAND = re.compile(r"/[A-Za-z]+")


@app.command("chat")
@verb(model_flags=MODEL, sampling=SAMPLING)
def chat(
    model: ModelArgument,
    model_flags: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Ask this, print the answer, leave; - reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="A Jinja chat template in place of the model's own.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="How it ended, the curve of P(stop) and the speed, on stderr.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With -p: the result as one JSON object.")] = False,
) -> None:
    """Chat with a model: interactively with history, or one question with -p. Only answers go to stdout.

    In a conversation, /reset forgets the history, /exit or Ctrl-D leaves, and Ctrl-C ends an answer early.

    Example: endstop chat smollm2-135m-instruct -p "How do you say thank you in Chinese?" --stats
    """
    from endstop.cli.session import open_model, require_template

    if as_json and prompt is None:
        raise typer.BadParameter("--json needs a prompt with -p")
    if raw and (system is not None or template is not None):
        raise typer.BadParameter("--raw sends no template, so --system and --template have no place in it")
    if prompt == "-":
        from endstop.cli.inputs import read_stdin

        prompt = read_stdin()
    with open_model(model, model_flags, sampling, template) as session:
        params = sampling_params(sampling, session.directory, trace=stats)
        if session.calls_in_stream and "skip_special_tokens" not in sampling:
            # Without their tags a call and what came back would run into the answer's words.
            params = replace(params, skip_special_tokens=False)
        if params.n != 1:
            raise ValueError("chat shows one answer; for --n use `endstop generate`.")
        if not raw:
            require_template(session, "send the prompt as it is with --raw")
        start = [{"role": "system", "content": system}] if system is not None else []
        if prompt is None:
            _converse(session, params, start, raw, stats)
            return
        asked = prompt if raw else [*start, {"role": "user", "content": prompt}]
        answer = _ask(session, asked, params, quiet=as_json)
        if as_json:
            from endstop.cli.output import write_json
            from endstop.cli.results import answer_dict

            write_json(answer_dict(session, answer))
        _after(session, answer, raw, stats)
        if answer.interrupted:
            raise typer.Exit(INTERRUPTED)


def _converse(session: Session, params: Any, start: list[dict[str, Any]], raw: bool, stats: bool) -> None:
    """Questions until the end of input. A truncated answer goes into the history closed and marked."""
    from endstop.cli.output import note
    from endstop.protocol.history import with_answer

    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        note("Ctrl-D or /exit leaves, /reset forgets the conversation.")
    messages = list(start)
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() and sys.stdout.isatty() else input()
        except EOFError:
            return
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages = list(start)
            note("The conversation starts anew.")
            continue
        if not line.strip():
            continue
        if _COMMAND.fullmatch(line.strip()):
            note(f"There is no command {line.strip()}; there are /reset and /exit.")
            continue
        asked: Any = line if raw else [*messages, {"role": "user", "content": line}]
        try:
            answer = _ask(session, asked, params)
        except ValueError as error:
            # A window that is full ends this question, not the conversation.
            note(f"endstop: {error}")
            continue
        _after(session, answer, raw, stats)
        if not raw:
            output = answer.output
            content = session.content_of(output)
            fields = {"reasoning_content": output.reasoning} if output.reasoning else {}
            truncated = output.finish_reason not in ("stop", "tool_calls")
            messages = with_answer(asked, content, truncated=truncated, **fields)


def _ask(session: Session, asked: Any, params: Any, quiet: bool = False) -> Answer:
    from endstop.cli.output import for_terminal, write_answer
    from endstop.cli.session import stream_answer

    def reason(text: str) -> None:
        sys.stderr.write(for_terminal(text))
        sys.stderr.flush()

    if quiet:
        return stream_answer(session, asked, params)
    answer = stream_answer(session, asked, params, write_answer, reason)
    write_answer("\n")
    return answer


def _after(session: Session, answer: Answer, raw: bool, stats: bool) -> None:
    """What the person should know about the answer, on stderr."""
    from endstop.cli.output import note
    from endstop.cli.session import note_statistics

    output = answer.output
    stops = session.llm.engine.stops.ids
    if raw and output.generated_token_ids[:1] and output.generated_token_ids[0] in stops:
        note(
            "endstop: the first token is already a terminator: without its template the model takes the "
            "prompt for a finished turn; try again without --raw."
        )
    if output.error:
        note(f"endstop: {output.error}")
    if output.open_call:
        note("endstop: a tool call was cut off and is not one.")
    if output.finish_reason == "length" and not stats:
        note(f"endstop: the answer is truncated ({output.stop_kind}).")
    if stats:
        note_statistics(session, answer)
