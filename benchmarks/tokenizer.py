"""Training a tokenizer beside rustbpe alone, and encoding beside tokenizers' batch encoding and tiktoken.

    python benchmarks/tokenizer.py [--megabytes 20] [--vocab 4096 32768] [--threads 1] [--json FILE]

The text is Python's own: the sources of the standard library and the topics of pydoc, in documents of at
most 10,000 characters. One run, interleaved: in every repetition each contender does the same work once, in
an order that rotates, so that whatever else the machine does meets all of them. Reported are medians; a ratio
is the median over repetitions of (their seconds / endstop's seconds), so above 1 endstop is faster.

`rustbpe` is its trainer and reading the ranks from it, without a tokenizer.json, checks or special tokens.
Every trainer learns the same merges, every encoder gives the same ids: both are checked.

    --clock cpu  counts processor seconds of the whole process instead of seconds on the wall; with
                 --threads 1 that gives sound ratios on a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pydoc_data.topics
import statistics
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCUMENT_CHARS = 10_000
BATCH = 512

Work = Callable[[], Any]


def documents(megabytes: float) -> list[str]:
    """Documents of the standard library, as many bytes as asked for or as there are."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = list(pydoc_data.topics.topics.values())
    for file in files:
        if "site-packages" not in file.parts:
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    kept, size = [], 0.0
    for text in texts:
        for start in range(0, len(text), DOCUMENT_CHARS):
            kept.append(text[start : start + DOCUMENT_CHARS])
            size += len(kept[-1].encode("utf-8")) / 1e6
            if size >= megabytes:
                return kept
    return kept


def interleaved(contenders: dict[str, Work], repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Medians of seconds and of ratios to `endstop`."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repeats):
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            begin = clock()
            contenders[name]()
            seconds[name].append(clock() - begin)
    return {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(
                theirs / ours for theirs, ours in zip(times, seconds["endstop"], strict=True)
            ),
        }
        for name, times in seconds.items()
    }


def training(texts: list[str], vocab_size: int) -> dict[str, Work]:
    import rustbpe

    from endstop.train.tokenizer_training import SMALLEST_VOCABULARY, split_pattern, train_tokenizer

    def alone() -> Any:
        trainer = rustbpe.Tokenizer()
        merges = vocab_size - SMALLEST_VOCABULARY
        trainer.train_from_iterator(iter(texts), 256 + merges, pattern=split_pattern())
        return trainer.get_mergeable_ranks()

    return {
        "endstop": lambda: train_tokenizer(texts, vocab_size),
        "endstop, engine tokenizers": lambda: train_tokenizer(texts, vocab_size, engine="tokenizers"),
        "rustbpe": alone,
    }


def encoding(texts: list[str], content: dict[str, Any], threads: int) -> dict[str, Work]:
    import tiktoken
    import tokenizers

    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.train.document_encoding import encode_documents
    from endstop.train.tokenizer_training import split_pattern

    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    crate = tokenizers.Tokenizer.from_str(json.dumps(content))
    pieces = TokenBytes.from_tokenizer_json(content)
    ranks = {piece: token_id for token_id, piece in enumerate(pieces) if token_id not in pieces.special}
    peer = tiktoken.Encoding("peer", pat_str=split_pattern(), mergeable_ranks=ranks, special_tokens={})
    ours = encode_documents(content, threads=threads)
    plain = encode_documents(content, engine="tokenizers")

    def by_crate(method: Callable[..., Any]) -> Work:
        return lambda: [e.ids for batch in batches for e in method(batch, add_special_tokens=False)]

    return {
        "endstop": lambda: [ids for batch in batches for ids in ours(batch)],
        "endstop, engine tokenizers": lambda: [ids for batch in batches for ids in plain(batch)],
        "tokenizers encode_batch": by_crate(crate.encode_batch),
        "tokenizers encode_batch_fast": by_crate(crate.encode_batch_fast),
        "tiktoken": lambda: [
            ids for batch in batches for ids in peer.encode_ordinary_batch(batch, num_threads=threads)
        ],
    }


def same_merges(contenders: dict[str, Work]) -> bool:
    from endstop.train.tokenizer_training import merges_of_ranks, tokenizer_json

    first, second = (contenders[name]() for name in ("endstop", "endstop, engine tokenizers"))
    ranks = {bytes(token): rank for token, rank in contenders["rustbpe"]()}
    return bool(first == second == tokenizer_json(merges_of_ranks(ranks)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/tokenizer.json"))
    options = parser.parse_args()
    # Read by both Rust libraries when they first run in parallel.
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if options.threads > 1 else "false"

    from endstop.train.tokenizer_training import train_tokenizer

    clock = time.perf_counter if options.clock == "wall" else time.process_time
    texts = documents(options.megabytes)
    size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    print(f"{size:.1f} MB in {len(texts)} documents, {options.threads} thread(s), {options.clock} clock")
    rows = []
    for vocab_size in options.vocab:
        trainers = training(texts, vocab_size)
        encoders = encoding(texts, train_tokenizer(texts, vocab_size), options.threads)
        ids = [encode() for encode in encoders.values()]
        checks = {"training": same_merges(trainers), "encoding": all(found == ids[0] for found in ids)}
        del ids
        for work, contenders in (("training", trainers), ("encoding", encoders)):
            found = interleaved(contenders, options.repeats, clock)
            said = "same merges" if work == "training" else "same ids"
            print(f"\n{work}, {vocab_size} tokens ({said}: {checks[work]})")
            print(f"{'':30} {'seconds':>8} {'MB/s':>7} {'ratio':>6}")
            for name, figures in found.items():
                rate = size / figures["seconds"]
                print(f"{name:30} {figures['seconds']:8.2f} {rate:7.1f} {figures['ratio']:6.2f}")
                rows.append(
                    {"work": work, "vocab_size": vocab_size, "name": name, "mb_per_second": rate, **figures}
                    | {"same": checks[work]}
                )
    result = {
        "machine": {"platform": platform.platform(), "processors": os.cpu_count()},
        "versions": {name: version(name) for name in ("tokenizers", "tiktoken", "rustbpe")},
        "settings": {
            "megabytes": size,
            "documents": len(texts),
            "threads": options.threads,
            "repeats": options.repeats,
            "clock": options.clock,
        },
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
