"""`endstop train`: the stages of a training, one after the other or alone."""

from __future__ import annotations

from endstop.cli.app import group_of

# In the order in which --help shows them.
STAGES = {
    "all": "endstop.cli.train_all",
    "plan": "endstop.cli.train_plan",
    "data": "endstop.cli.train_data",
    "tokenizer": "endstop.cli.train_tokenizer",
    "base": "endstop.cli.train_base",
    "mid": "endstop.cli.train_mid",
    "sft": "endstop.cli.train_sft",
    "rl": "endstop.cli.train_rl",
    "report": "endstop.cli.train_report",
}

app = group_of(
    STAGES, "Train a model that stops: tokenizer, base, mid, SFT, RL; each gives a Hugging Face directory."
)
