"""What packing does to a real corpus: use of rows, tokens cropped, documents whose end is learned, speed.

    python benchmarks/packing.py [--data data] [--corpora gcide sotu docstrings pydoc] [--row-length 2048 512]

The corpora are made by `endstop train data` if they are not there. All their documents, once, in the
order of a mixture, go through every way of packing; the tokenizer (byte-level BPE) is trained on them.
Beside endstop's two ways (crop, keep-ends) are shown, each by its plain rule and not for its speed:

    greedy crop     documents in their order, the last of a row is cropped to what is left
    greedy pad      documents in their order, one that does not fit begins the next row, the rest is padding
    best fit        nanochat's rule, documents as long as they are (endstop crops them to a row first)
    stream          documents in their order, cut into rows wherever it comes

An end counts as learned where the BOS behind the document is a target in the same row. `split` are
documents that stand in more than one row, so that their later tokens are learned without their beginning.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from endstop.train.data.corpora import CORPORA, make_corpus
from endstop.train.data.mixture import Mixture
from endstop.train.data.packing import CropPacker, Document, KeepEndsPacker
from endstop.train.data.sources import open_text_source

BUFFER = 1000


@dataclass
class Result:
    """Of one way of packing; `tokens` are those of all documents that were placed or cropped."""

    name: str
    rows: int = 0
    tokens: int = 0
    cropped: int = 0
    padded: int = 0
    documents: int = 0
    ends: int = 0
    split: int = 0
    seconds: float | None = None
    steps_per_placement: float | None = None

    def figures(self) -> dict[str, object]:
        return {
            "name": self.name,
            "rows": self.rows,
            "documents": self.documents,
            "use": 1 - self.padded / (self.tokens - self.cropped + self.padded),
            "cropped_share": self.cropped / self.tokens,
            "ends_share": self.ends / self.documents,
            "split_share": self.split / self.documents,
            "documents_per_second": None if self.seconds is None else self.documents / self.seconds,
            "tokens_per_second": None if self.seconds is None else self.tokens / self.seconds,
            "steps_per_placement": self.steps_per_placement,
        }


def greedy_crop(lengths: Sequence[int], row_length: int) -> Result:
    result = Result("greedy crop")
    room = row_length + 1
    for length in lengths:
        placed = min(length, room)
        room -= placed
        result.ends += placed == length and room > 0
        result.cropped += length - placed
        if not room:
            result.rows, room = result.rows + 1, row_length + 1
    return _with_totals(result, lengths)


def greedy_pad(lengths: Sequence[int], row_length: int) -> Result:
    result = Result("greedy pad")
    room = row_length + 1
    whole_before = False
    for length in lengths:
        placed = min(length, row_length + 1)
        if placed > room:
            # The end of the row's last document stands before padding.
            result.padded += room
            result.rows, room, whole_before = result.rows + 1, row_length + 1, False
        result.ends += whole_before
        room -= placed
        result.cropped += length - placed
        whole_before = placed == length
    result.padded += room
    result.rows += 1
    return _with_totals(result, lengths)


def best_fit(lengths: Sequence[int], row_length: int) -> Result:
    """nanochat's rule, with documents of any length in the buffer."""
    result = Result("best fit")
    waiting: list[int] = []
    coming = iter(lengths)
    used: list[int] = []
    while True:
        room = row_length + 1
        while room:
            while len(waiting) < BUFFER and (length := next(coming, None)) is not None:
                insort(waiting, length)
            if not waiting:
                return _with_totals(result, used)
            at = bisect_right(waiting, room) - 1
            length = waiting.pop(max(at, 0))
            used.append(length)
            placed = min(length, room)
            room -= placed
            result.cropped += length - placed
            result.ends += placed == length and room > 0
        result.rows += 1


def stream(lengths: Sequence[int], row_length: int) -> Result:
    result = Result("stream", ends=len(lengths))
    start = 0
    for length in lengths:
        result.split += start // row_length != (start + length - 1) // row_length
        start += length
    result.rows = start // row_length
    return _with_totals(result, lengths)


def _with_totals(result: Result, lengths: Sequence[int]) -> Result:
    result.documents, result.tokens = len(lengths), sum(lengths)
    return result


def packed(packer: CropPacker | KeepEndsPacker, documents: Sequence[array[int]], name: str) -> Result:
    """One of endstop's packers over all documents, as far as whole rows go."""
    coming = iter(documents)
    left = True

    def refill() -> None:
        nonlocal left
        while left and len(packer) < BUFFER:
            tokens = next(coming, None)
            if tokens is None:
                left = False
                return
            packer.add(Document(tokens))

    begin = time.perf_counter()
    while True:
        try:
            packer.next_row(refill)
        except ValueError:
            # The documents have come to an end within a row.
            break
    seconds = time.perf_counter() - begin
    counts = packer.counts
    return Result(
        name,
        counts.rows,
        counts.placed_tokens + counts.cropped_tokens,
        counts.cropped_tokens,
        0,
        counts.documents,
        counts.supervised_ends,
        counts.split_documents,
        seconds,
        counts.steps / counts.placements,
    )


def tokenised(data: Path, names: Sequence[str], vocabulary: int) -> list[array[int]]:
    """The documents of the corpora in the order of a mixture, BOS (id 0) in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    mixture = Mixture([(open_text_source(make_corpus(CORPORA[name], data).path), 1.0) for name in names])
    order = mixture.order(0)
    texts = [mixture.item(order[at]) for at in range(len(mixture))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:: max(1, len(texts) // 20_000)], trainer)
    return [array("i", [0, *encoding.ids]) for encoding in tokenizer.encode_batch(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--corpora", nargs="+", default=["gcide", "sotu", "docstrings", "pydoc"])
    parser.add_argument("--row-length", nargs="+", type=int, default=[2048, 512])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/packing.json"))
    options = parser.parse_args()

    documents = tokenised(options.data, options.corpora, options.vocabulary)
    lengths = [len(tokens) for tokens in documents]
    total = sum(lengths)
    report: dict[str, object] = {
        "corpora": options.corpora,
        "documents": len(lengths),
        "tokens": total,
        "buffer": BUFFER,
        "python": platform.python_version(),
        "runs": {},
    }
    print(f"{len(lengths):,} documents, {total:,} tokens, of {', '.join(options.corpora)}")
    for row_length in options.row_length:
        floor = sum(max(0, length - row_length - 1) for length in lengths) / total
        results = [
            *(way(lengths, row_length) for way in (greedy_crop, greedy_pad, best_fit)),
            packed(CropPacker(row_length, 0), documents, "endstop crop"),
            stream(lengths, row_length),
            packed(KeepEndsPacker(row_length, 0), documents, "endstop keep-ends"),
        ]
        rows = [result.figures() for result in results]
        longer = sum(length > row_length for length in lengths) / len(lengths)
        report["runs"][str(row_length)] = {"beyond_a_row": floor, "longer": longer, "ways": rows}  # type: ignore[index]
        print(f"\nrows of {row_length} tokens; {floor:.1%} of all tokens lie beyond a document's first row,")
        print(f"{longer:.2%} of the documents are longer than a row")
        print(
            f"{'':<18}{'use':>8}{'cropped':>9}{'ends':>8}{'split':>8}{'steps':>7}{'docs/s':>10}{'tokens/s':>12}"
        )
        for row in rows:
            line = f"{row['name']:<18}{row['use']:>8.2%}{row['cropped_share']:>9.2%}{row['ends_share']:>8.2%}"
            line += f"{row['split_share']:>8.2%}"
            if row["documents_per_second"] is not None:
                line += f"{row['steps_per_placement']:>7.2f}{row['documents_per_second']:>10,.0f}"
                line += f"{row['tokens_per_second']:>12,.0f}"
            print(line)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
