"""A generation loop of one's own over a transformers model, which stops exactly.

    python examples/own_loop.py MODEL_DIRECTORY "The capital of France is"

Everything about stopping is in `machine`: what ends the row, what may be shown, what may not be sampled yet.
The loop has no KV cache, to stay short; a cache changes nothing about stopping.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes

path, prompt = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(path).eval()
ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
params = SamplingParams(max_tokens=64, min_tokens=1, stop=["\n\n", "END"])
machine = StopMachine(
    StopSet.from_pretrained(path), params, TokenBytes.from_pretrained(path), prompt_len=ids.shape[1]
)
with torch.inference_mode():
    while not machine.finished:
        logits = model(ids).logits[0, -1]
        logits[list(machine.banned_ids())] = -torch.inf
        token = logits.argmax()
        print(machine.push(int(token)).text, end="", flush=True)
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
print(f"\n[{machine.finish_reason}, {machine.stop_kind}, {machine.stop_reason!r}]", file=sys.stderr)
