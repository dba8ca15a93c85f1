"""LLM: a model by name, ready to generate and chat."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from endstop.protocol.errors import MissingTemplate
from endstop.protocol.params import SamplingParams
from endstop.runtime.chat import ChatFormat, Conversation
from endstop.runtime.engine import Engine
from endstop.runtime.requests import Prompt
from endstop.runtime.results import Delta, RequestOutput
from endstop.runtime.sequence import StreamTool
from endstop.runtime.token_model import TokenModel

if TYPE_CHECKING:
    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.protocol.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Backend = Literal["native", "transformers"]
MakeTool = Callable[[], StreamTool] | Literal["auto"] | None


class LLM:
    """A model with its tokenizer, stop set and engine.

    Args:
        model: a directory, a .gguf file, a Hub id or a registry name.
        dtype: "auto", "float32" or "bfloat16". device: "auto", "cpu", "cuda", ...
        revision: of the Hub repository. offline: use no network.
        backend: "native", or "transformers" for architectures that endstop does not run itself.
        chat_template: Jinja source that replaces the model's own.
        max_rows: rows computed at once. max_batch_tokens: tokens computed in one step.
        memory_budget: bytes of KV cache; None lets the backend choose.
        make_tool: makes the in-stream tool of each row. "auto" is the calculator where the vocabulary has its
            four tags as special tokens (nanochat's format, and that of `endstop train`), else none; None is
            none.

    `with LLM(...) as llm` frees the model at the end. Thread-safe. It needs no event loop and may be used
    where one runs, as in Jupyter.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        revision: str | None = None,
        offline: bool | None = None,
        backend: Backend = "native",
        chat_template: str | None = None,
        max_rows: int = 32,
        max_batch_tokens: int = 2048,
        memory_budget: int | None = None,
        make_tool: MakeTool = "auto",
    ) -> None:
        self.engine = load_engine(
            model,
            dtype=dtype,
            device=device,
            revision=revision,
            offline=offline,
            backend=backend,
            chat_template=chat_template,
            max_rows=max_rows,
            max_batch_tokens=max_batch_tokens,
            memory_budget=memory_budget,
            make_tool=make_tool,
        )

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts: a text, token ids, or a list of either. See Engine.generate."""
        return self.engine.generate(prompts, params, **options)

    def chat(
        self,
        messages: Conversation | Items[Conversation],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        tools: Items[Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The assistant's next message of one conversation or several. See Engine.chat."""
        return self.engine.chat(messages, params, tools=tools, **options)

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Items[Any] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Deltas of one prompt, or of the next message where `prompt` is a conversation."""
        if is_conversation(prompt):
            return self.engine.stream_chat(prompt, params, tools=tools, **options)  # type: ignore[arg-type]
        return self.engine.stream(prompt, params, **options)  # type: ignore[arg-type]

    def abort(self, request_id: str) -> bool:
        """Cancel a request. See Engine.abort."""
        return self.engine.abort(request_id)

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Swap the weights. See Engine.load_weights."""
        self.engine.load_weights(state_dict)

    def close(self) -> None:
        """Cancel what is unfinished and free the cache."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_engine(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    offline: bool | None = None,
    backend: Backend = "native",
    chat_template: str | None = None,
    max_rows: int = 32,
    max_batch_tokens: int = 2048,
    memory_budget: int | None = None,
    make_tool: MakeTool = "auto",
) -> Engine:
    """Resolve, read and load a model; arguments as for LLM."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "running a model needs torch: pip install 'endstop[torch]'", name="torch"
        ) from error
    from endstop.models.gguf import ensure_directory
    from endstop.protocol.resolve import resolve_model

    resolved = resolve_model(model, revision=revision, offline=offline)
    directory = ensure_directory(resolved)
    token_model = load_token_model(
        directory,
        dtype=dtype,
        device=device,
        backend=backend,
        max_rows=max_rows,
        memory_budget=memory_budget,
    )
    return engine_over(
        token_model,
        directory,
        chat_template=chat_template,
        make_tool=make_tool,
        max_rows=max_rows,
        max_batch_tokens=max_batch_tokens,
    )


def engine_over(
    model: TokenModel,
    directory: str | Path,
    *,
    chat_template: str | None = None,
    make_tool: MakeTool = "auto",
    max_rows: int = 32,
    max_batch_tokens: int = 2048,
) -> Engine:
    """An engine over weights that are there already: stop set, chat format and tool as a directory's files
    have them. Arguments as for LLM; the weights may be in training, and be brought up to date later."""
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.protocol.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(directory)
    stops = StopSet.from_pretrained(directory, chat_template=chat_template)
    for conflict in stops.conflicts:
        logger.info("stop set of %s: %s", directory, conflict.message)
    try:
        chat_format: ChatFormat | None = ChatFormat(tokenizer, chat_template, stops)
    except MissingTemplate:  # a base model: it generates, and `chat` says what is missing
        chat_format = None
    pieces = TokenBytes.from_pretrained(directory)
    return Engine(
        model,
        stops,
        pieces,
        encode=tokenizer.encode,
        encode_text=tokenizer.encode_text,
        chat_format=chat_format,
        make_tool=calculator_of(tokenizer, pieces) if make_tool == "auto" else make_tool,
        max_rows=max_rows,
        max_batch_tokens=max_batch_tokens,
    )


def calculator_of(tokenizer: Tokenizer, pieces: TokenBytes) -> Callable[[], StreamTool] | None:
    """The calculator bound to a vocabulary that has its four tags as special tokens, None for any other."""
    from endstop.runtime.tools import Calculator, in_stream_tool

    ids = {token.content: token_id for token_id, token in tokenizer.added_tokens.items() if token.special}
    tool = Calculator()
    if not {tool.start_token, tool.end_token, tool.output_start, tool.output_end} <= ids.keys():
        return None
    return in_stream_tool(tool, token_ids=ids, pieces=pieces.__getitem__, encode_text=tokenizer.encode_text)


def load_token_model(
    directory: Path,
    *,
    dtype: str,
    device: str,
    backend: Backend,
    max_rows: int,
    memory_budget: int | None,
) -> TokenModel:
    """The weights behind the engine."""
    # Rows that compute, and as many that are kept for their prefix.
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": available_device(device),
        "max_rows": 2 * max_rows,
        "memory_budget": memory_budget,
    }
    if backend == "native":
        from endstop.runtime.native import NativeModel

        return NativeModel.from_pretrained(directory, **options)
    if backend == "transformers":
        from endstop.runtime.transformers_model import TransformersModel

        return TransformersModel.from_pretrained(directory, **options)
    raise ValueError(f"backend must be 'native' or 'transformers', got {backend!r}")


def available_device(device: str) -> str:
    """`device`, where "auto" is CUDA if there is one, else the CPU. Raises ValueError for one not here."""
    from endstop.runtime.native.model import choose_device

    return str(choose_device(device))


def is_conversation(prompt: Any) -> bool:
    """Whether this is a list of messages, and no text and no token ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
