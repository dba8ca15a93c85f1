"""The teaching model's answer as a trace document."""

from __future__ import annotations

from endstop.view.document import TraceDocument, completed_texts, set_params


def teaching_document() -> TraceDocument:
    """Run the model of 7 tokens through the real engine: the prompt [1, 2] gives 3, 5 and the end, 6."""
    import time

    from endstop.protocol.params import SamplingParams
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.runtime.engine import Engine
    from endstop.runtime.teaching import EOS, PROMPT, VOCABULARY, TeachingModel

    names = [f"[{token_id}]" for token_id in range(VOCABULARY)]
    names[EOS] = "[end]"
    pieces = TokenBytes([name.encode() for name in names], special={EOS})
    engine = Engine(TeachingModel(), StopSet.of({EOS: "eos"}), pieces)
    params = SamplingParams(temperature=0.0, max_tokens=8, trace=True)
    started = time.monotonic()
    output = engine.generate(list(PROMPT), params)[0].outputs[0]
    seconds = time.monotonic() - started
    engine.close()
    assert output.trace is not None, "the request asked for a trace"
    ids = [step.token_id for step in output.trace.steps]
    return TraceDocument(
        output.trace,
        completed_texts(ids, [pieces[token_id] for token_id in ids]),
        output.text,
        "teaching model",
        "".join(names[token_id] for token_id in PROMPT),
        output.finish_reason,
        output.stop_kind,
        output.stop_reason,
        len(ids) / seconds,
        set_params(params),
        {EOS: names[EOS]},
    )
