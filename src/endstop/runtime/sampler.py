"""Logits in, tokens out: processors, then one draw for each row, all rows at once.

Order of the processors, as in vLLM: bad_words, min_tokens (and ban_eos), logit_bias, penalties, temperature,
min_p, top_k, top_p. Temperature 0 is greedy: the largest logit after the penalties, the lowest id among
equals. Logprobs and traces come from the raw log-softmax, before any processor.

Choices that a definition leaves open:
- penalties never touch the stop set: a terminator that stands in every earlier turn must not become less
  likely with every turn. They count generated tokens (forced ones too), repetition counts the prompt as well.
- top_k and top_p keep an exact number of tokens; among equal logits the lower ids are kept.
- where the bans of min_tokens leave no token, they are lifted (a grammar may want the end earlier). Where
  there is still none the row ends: kind `grammar` if no further token was needed, else `error`.
- a logit_bias of infinity counts as 1e30, so that the row stays a distribution.
- NaN or +inf in the raw logits ends that row with `error`, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from endstop.protocol.params import SamplingParams
from endstop.runtime.distribution import (
    column,
    invert,
    invert_listed,
    is_restricted,
    restricted,
    weights_of,
)
from endstop.runtime.draw import uniform
from endstop.runtime.results import Logprob, TokenLogprobs
from endstop.runtime.sampled import Sampled, SampledRow
from endstop.runtime.trace import measure

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_BIAS = 1e30
_SMALLEST_PENALTY, _LARGEST_PENALTY = 1e-30, 1e30


def is_plain(params: SamplingParams) -> bool:
    """Whether the row's token is the largest raw logit and nothing else is asked for."""
    return (
        params.temperature == 0
        and not params.bad_words
        and not params.logit_bias
        and not _penalised(params)
        and params.logprobs is None
        and not params.trace
    )


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[Sampled]:
    """One token for each row.

    `logits`: float32 [R, V], left as it is. Rows may be of any number of requests; what a row gets depends
    on its own logits and state only.
    """
    banned = [row.banned_ids() for row in rows]
    if not any(banned) and all(is_plain(row.params) for row in rows):
        return [
            Sampled(token_id) if -_LARGEST <= value <= _LARGEST else _without_token(value, row)
            for value, token_id, row in zip(*largest(logits), rows, strict=True)
        ]
    raw = logits.float()
    peak = raw.amax(dim=-1).tolist()
    work = edited(raw, rows, banned)
    legal = work.amax(dim=-1).tolist() if work is not raw else peak
    outcomes: list[Sampled | None] = [None] * len(rows)
    for r, row in enumerate(rows):
        if not peak[r] <= _LARGEST:  # NaN or +inf
            outcomes[r] = _without_token(peak[r], row)
        elif legal[r] == -torch.inf:
            lifted = frozenset(row.stop_ids) if row.params.ban_eos else frozenset()
            alone = edited(raw[r : r + 1], [row], [lifted])
            if alone.amax().item() == -torch.inf:
                outcomes[r] = _without_token(-torch.inf, row)
            else:
                work = work.clone() if work is raw else work
                work[r] = alone[0]
    open_rows = [r for r in range(len(rows)) if outcomes[r] is None]
    greedy = [r for r in open_rows if rows[r].params.temperature == 0]
    drawn = [r for r in open_rows if rows[r].params.temperature > 0]
    if greedy:
        for r, token_id in zip(greedy, largest(_some(work, greedy))[1], strict=True):
            outcomes[r] = Sampled(token_id)
    if drawn:
        tokens = drawn_tokens(_some(work, drawn), [rows[r] for r in drawn])
        for r, token_id in zip(drawn, tokens, strict=True):
            outcomes[r] = Sampled(token_id)
    results = [outcome for outcome in outcomes if outcome is not None]
    _report(raw, rows, results)
    return results


def largest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row and its id, the lowest among equals; NaN counts as the largest."""
    if logits.device.type == "cpu":  # NumPy's argmax is vectorised, torch's is ten times slower
        table = logits.numpy()
        found = table.argmax(axis=-1)
        return table[range(len(table)), found].tolist(), found.tolist()
    values, ids = logits.max(dim=-1)
    return values.tolist(), ids.tolist()


def drawn_tokens(logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """One token for each row from its processed logits, by its draw."""
    weights = weights_of(logits, [row.params for row in rows])
    draws = [uniform(row.seed, row.index, row.sampled) for row in rows]
    short = [r for r, row in enumerate(rows) if is_restricted(row.params)]
    whole = [r for r, row in enumerate(rows) if not is_restricted(row.params)]
    tokens = [0] * len(rows)
    if whole:
        found = invert(_some(weights, whole), [draws[r] for r in whole])
        for r, token_id in zip(whole, found, strict=True):
            tokens[r] = token_id
    if short:
        ids, listed = restricted(_some(weights, short), [rows[r].params for r in short])
        for r, token_id in zip(short, invert_listed(ids, listed, [draws[r] for r in short]), strict=True):
            tokens[r] = token_id
    return tokens


def token_logprobs(
    logprobs: torch.Tensor, token_ids: Sequence[int], alternatives: int
) -> list[TokenLogprobs]:
    """Entries for chosen tokens and the likeliest alternatives from a raw log-softmax [R, V]."""
    index = torch.tensor(token_ids, device=logprobs.device)[:, None]
    chosen = logprobs.gather(-1, index)
    ranks = (1 + (logprobs > chosen).sum(dim=-1)).tolist()
    entries = [
        {token_id: Logprob(value, rank)}
        for token_id, value, rank in zip(token_ids, chosen[:, 0].tolist(), ranks, strict=True)
    ]
    if alternatives:
        top = torch.topk(logprobs, min(alternatives, logprobs.shape[-1]), dim=-1)
        for entry, values, ids in zip(entries, top.values.tolist(), top.indices.tolist(), strict=True):
            for rank, (value, token_id) in enumerate(zip(values, ids, strict=True), start=1):
                entry.setdefault(token_id, Logprob(value, rank))
    return entries


@torch.inference_mode()
def given_logprobs(logits: torch.Tensor, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    """Entries for tokens that were given, not drawn: `logits` [R, V] and R ids."""
    if not token_ids:
        return []
    entries = token_logprobs(torch.log_softmax(logits.float(), dim=-1), token_ids, alternatives)
    return [_first(entry, alternatives) for entry in entries]


def banned_by_bad_words(bad_words: Sequence[Sequence[int]], generated: Sequence[int]) -> set[int]:
    """Ids that would complete a bad word: its last id, where the generated tokens end with the ids before it.

    vLLM's rule: generated tokens only, and the spelling given by the token sequence only.
    """
    banned = set()
    for word in bad_words:
        before = len(word) - 1
        if before == 0 or list(generated[-before:]) == list(word[:-1]):
            banned.add(word[-1])
    return banned


def _without_token(peak: float, row: SampledRow) -> Sampled:
    if peak == -torch.inf and len(row.generated_token_ids) >= row.params.min_tokens:
        return Sampled(end="grammar")
    if peak == -torch.inf:
        return Sampled(end="error", error="no token can follow, and min_tokens is not reached")
    return Sampled(end="error", error="the model's logits are not numbers (NaN or infinity)")


def edited(raw: torch.Tensor, rows: Sequence[SampledRow], banned: Sequence[frozenset[int]]) -> torch.Tensor:
    """bad_words, bans, logit_bias and penalties. Gives `raw` itself back where nothing applies."""
    ban_at: tuple[list[int], list[int]] = ([], [])
    bias_at: tuple[list[int], list[int]] = ([], [])
    bias: list[float] = []
    size = raw.shape[-1]
    for r, row in enumerate(rows):
        ids: set[int] | frozenset[int] = banned[r]
        if row.bad_words:
            ids = ids | banned_by_bad_words(row.bad_words, row.generated_token_ids)
        inside = [token_id for token_id in ids if token_id < size]
        ban_at[0].extend([r] * len(inside))
        ban_at[1].extend(inside)
        for token_id, value in row.params.logit_bias.items():
            bias_at[0].append(r)
            bias_at[1].append(token_id)
            bias.append(min(value, _LARGEST_BIAS))
    penalised = [r for r, row in enumerate(rows) if _penalised(row.params)]
    if not (ban_at[0] or bias or penalised):
        return raw
    work = raw.clone()
    if bias:
        at = tuple(torch.tensor(part, device=raw.device) for part in bias_at)
        work[at] += torch.tensor(bias, dtype=work.dtype, device=raw.device)
    if ban_at[0]:  # -inf absorbs every finite bias, so the order of these two is free
        work[tuple(torch.tensor(part, device=raw.device) for part in ban_at)] = -torch.inf
    if penalised:
        work[penalised] = _with_penalties(work[penalised], [rows[r] for r in penalised])
    return work


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class _Counts:
    """Which tokens a row has seen and how often it generated them; updated by the tokens that are new."""

    def __init__(self, row: SampledRow, size: int, device: torch.device) -> None:
        self.seen = torch.zeros(size, dtype=torch.bool, device=device)
        self.seen[row.prompt_token_ids] = True
        self.generated = torch.zeros(size, dtype=torch.float32, device=device)
        self.exempt = [token_id for token_id in row.stop_ids if token_id < size]
        self.upto = 0

    def update(self, generated: Sequence[int]) -> None:
        new = torch.tensor(list(generated[self.upto :]), dtype=torch.int64, device=self.seen.device)
        self.seen[new] = True
        self.generated.index_add_(0, new, torch.ones(len(new), device=self.seen.device))
        self.seen[self.exempt] = False
        self.generated[self.exempt] = 0
        self.upto = len(generated)


def _with_penalties(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    for row in rows:
        if row.sampler_state is None:
            row.sampler_state = _Counts(row, logits.shape[-1], logits.device)
        row.sampler_state.update(row.generated_token_ids)
    seen = torch.stack([row.sampler_state.seen for row in rows])
    counts = torch.stack([row.sampler_state.generated for row in rows])
    repetition = column(
        [min(max(row.params.repetition_penalty, _SMALLEST_PENALTY), _LARGEST_PENALTY) for row in rows], logits
    )
    frequency = column([row.params.frequency_penalty for row in rows], logits)
    presence = column([row.params.presence_penalty for row in rows], logits)
    # Repetition: Keskar et al., "CTRL", 2019, with the sign rule that makes it a penalty for negative logits.
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    # A tiny penalty makes a large logit infinite, and a row with that is no distribution.
    logits = torch.where(seen, repeated.clamp_max(_LARGEST), logits)
    return logits - frequency * counts - presence * (counts > 0)


def _report(raw: torch.Tensor, rows: Sequence[SampledRow], outcomes: Sequence[Sampled]) -> None:
    wanted = [
        r
        for r, row in enumerate(rows)
        if (row.params.logprobs is not None or row.params.trace) and outcomes[r].end is None
    ]
    if not wanted:
        return
    logprobs = torch.log_softmax(_some(raw, wanted), dim=-1)
    most = max(rows[r].params.logprobs or 0 for r in wanted)
    entries = token_logprobs(logprobs, [outcomes[r].token_id for r in wanted], most)
    for i, r in enumerate(wanted):
        number = rows[r].params.logprobs
        if number is not None:
            outcomes[r].logprobs = _first(entries[i], number)
        if rows[r].params.trace:
            outcomes[r].trace = measure(logprobs[i], rows[r].stop_ids, outcomes[r].token_id)


def _first(entry: TokenLogprobs, alternatives: int) -> TokenLogprobs:
    """The chosen token, and the alternatives up to rank `alternatives`."""
    items = list(entry.items())
    return dict(items[:1] + [item for item in items[1:] if item[1].rank <= alternatives])


def _some(table: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of a table, without a copy where it is all of them."""
    return table if len(rows) == len(table) else table[rows]
