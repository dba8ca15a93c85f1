"""`endstop eval`: what a tokenizer, a base model or a chat model can do."""

from __future__ import annotations

from endstop.cli.app import group_of

KINDS = {
    "tokenizer": "endstop.cli.eval_tokenizer",
    "base": "endstop.cli.eval_base",
    "chat": "endstop.cli.eval_chat",
    "long-context": "endstop.cli.eval_long_context",
}

app = group_of(KINDS, "Evaluate a tokenizer, a base model or a chat model, stopping included.")
