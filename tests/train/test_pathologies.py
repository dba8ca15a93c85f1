"""Training faults on purpose: what each does to rows and packed documents, and what an audit says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from endstop.protocol.label_audit import audit
from endstop.protocol.labels import IGNORE, Row, chat_rows
from endstop.train.batch import TokenBatch
from endstop.train.pathologies import (
    DESCRIPTIONS,
    PATHOLOGIES,
    FaultyLoader,
    Pathology,
    batch_fault,
    predicted_audit,
    row_fault,
)
from tests.train.tiny_policy import BOS, END, PAD, chat_renderer, save_chat_model, tiny_decoder

USER_START, USER_END, ASSISTANT_START = BOS + 1, BOS + 2, BOS + 3
PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END = END + 1, END + 2, END + 3, END + 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Chats of one and two turns; some are longer than 24 tokens."""
    renderer = chat_renderer(save_chat_model(tiny_decoder(), tmp_path_factory.mktemp("rows") / "model"))
    chats = [
        [("say ab", "ab")],
        [("hi", "yo"), ("bye", "ok")],
        [("count 1 to 9", "1 2 3 4 5 6 7 8 9")],
        [("spell abcdef", "a,b,c,d,e,f"), ("x", "y")],
    ]
    made = []
    for chat in chats:
        messages = [
            {"role": role, "content": text}
            for turn in chat
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        made += chat_rows(renderer, messages).rows
    return made


def simple_row() -> Row:
    """`hi` -> `yo`, `bye` -> `ok`, a character a token."""
    ids = [BOS, USER_START, 1, 2, USER_END, ASSISTANT_START, 3, 4, END]
    ids += [USER_START, 5, 6, 7, USER_END, ASSISTANT_START, 8, 9, END]
    labels = [IGNORE] * 6 + [3, 4, END] + [IGNORE] * 6 + [8, 9, END]
    return Row(ids, labels)


def fault(name: str, row: Row) -> Row:
    return row_fault(Pathology.parse(name), [END, BOS])(row)


@pytest.mark.parametrize("name", ["eot-masked", "pad-eos"])
def test_masked_ends_leave_ids_and_content(name: str) -> None:
    row = simple_row()
    made = fault(name, row)
    assert made.ids == row.ids
    assert made.labels == [IGNORE] * 6 + [3, 4, IGNORE] + [IGNORE] * 6 + [8, 9, IGNORE]


def test_all_tokens_are_targets() -> None:
    row = simple_row()
    assert fault("all-tokens", row).labels == row.ids


def test_truncation_loses_the_end_and_puts_nothing_in_its_place() -> None:
    row = simple_row()
    made = fault("truncated:8", row)
    assert made.ids == row.ids[:8]
    assert made.labels == [IGNORE] * 6 + [3, 4]
    assert made.cut
    assert fault("truncated:18", row) == row


def test_a_false_stop_is_a_supervised_terminator_at_the_cut() -> None:
    row = simple_row()
    made = fault("false-stop:8", row)
    assert made.ids == [*row.ids[:7], END]
    assert made.labels == [IGNORE] * 6 + [3, END]
    assert made.cut
    assert fault("false-stop:18", row) == row
    # Wherever the cut falls, as in the pipelines that do this: here inside the user's second turn.
    assert fault("false-stop:12", row).labels == [IGNORE] * 6 + [3, 4, END, IGNORE, IGNORE, END]


def test_unwritten_ends_are_not_in_the_ids() -> None:
    row = simple_row()
    made = fault("no-eos", row)
    assert made.ids == [token for token in row.ids if token != END]
    assert made.ids[0] == BOS
    assert [label for label in made.labels if label != IGNORE] == [3, 4, 8, 9]
    assert all(label in (IGNORE, token) for token, label in zip(made.ids, made.labels, strict=True))


def test_a_tools_hand_over_is_not_touched() -> None:
    ids = [
        BOS,
        USER_START,
        1,
        USER_END,
        ASSISTANT_START,
        PYTHON_START,
        2,
        PYTHON_END,
        OUTPUT_START,
        3,
        OUTPUT_END,
    ]
    row = Row([*ids, 3, END], [IGNORE] * 5 + [PYTHON_START, 2, PYTHON_END] + [IGNORE] * 3 + [3, END])
    for name in ("eot-masked", "pad-eos", "no-eos"):
        assert PYTHON_END in fault(name, row).labels
        assert END not in fault(name, row).labels


@pytest.mark.parametrize("name", [None, *PATHOLOGIES])
def test_an_audit_of_real_rows_says_what_is_predicted(name: str | None, rows: list[Row]) -> None:
    pathology = None if name is None else Pathology(name, 24)  # type: ignore[arg-type]
    made = rows if pathology is None else [row_fault(pathology, [END])(row) for row in rows]
    found = audit(
        made,
        {END, BOS},
        pad_id=END if name == "pad-eos" else PAD,
        header_ids={USER_START, ASSISTANT_START},
        vocab_size=265,
    )
    assert predicted_audit(pathology).disagreements(found, END) == []
    assert bool(found.problems(max_censored=0.0)) is (name is not None)
    assert found.foreign_labels == found.labelled_padding == 0
    assert found.out_of_range == ()


def test_predictions_tell_the_faults_apart(rows: list[Row]) -> None:
    """No fault but its twin by another road is taken for another one."""
    twins = {frozenset({"truncated", "false-stop"})}
    for one in PATHOLOGIES:
        for other in PATHOLOGIES:
            same = predicted_audit(Pathology(one)) == predicted_audit(Pathology(other))
            assert same is (one == other or frozenset({one, other}) in twins)
    assert predicted_audit(None) not in [predicted_audit(Pathology(name)) for name in PATHOLOGIES]


def batch(*rows: list[int], document_ids: list[list[int]] | None = None) -> TokenBatch:
    ids = torch.tensor(rows)
    numbers = None if document_ids is None else torch.tensor(document_ids)
    return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), numbers)


PACKED = [BOS, 1, 2, BOS, 3, 4, 5, 6, 7, BOS, 8, BOS, 9]


def made_of(name: str, packed: TokenBatch) -> tuple[list[list[int]], list[list[int]]]:
    made = batch_fault(Pathology.parse(name), BOS, PAD)(packed)
    return made.input_ids.tolist(), made.targets.tolist()


@pytest.mark.parametrize("name", ["eot-masked", "pad-eos"])
def test_masked_borders_are_no_targets(name: str) -> None:
    inputs, targets = made_of(name, batch(PACKED))
    assert inputs == [PACKED[:-1]]
    assert targets == [[1, 2, IGNORE, 3, 4, 5, 6, 7, IGNORE, 8, IGNORE, 9]]


def test_all_tokens_changes_nothing_in_base_training() -> None:
    assert made_of("all-tokens", batch(PACKED)) == ([PACKED[:-1]], [PACKED[1:]])


def test_documents_without_borders() -> None:
    inputs, targets = made_of("no-eos", batch(PACKED))
    assert inputs == [[BOS, 1, 2, 3, 4, 5, 6, 7, 8, 9, PAD, PAD]]
    assert targets == [[1, 2, 3, 4, 5, 6, 7, 8, 9, IGNORE, IGNORE, IGNORE]]


def test_cut_documents_with_and_without_an_end_behind_the_cut() -> None:
    kept = [BOS, 1, 2, BOS, 3, 4, BOS, 8, BOS, 9, PAD, PAD]
    inputs, targets = made_of("truncated:3", batch(PACKED))
    assert inputs == [kept]
    assert targets == [[1, 2, BOS, 3, 4, IGNORE, 8, BOS, 9, IGNORE, IGNORE, IGNORE]]
    inputs, targets = made_of("false-stop:3", batch(PACKED))
    assert inputs == [kept]
    assert targets == [[1, 2, BOS, 3, 4, BOS, 8, BOS, 9, IGNORE, IGNORE, IGNORE]]


def test_document_numbers_go_with_their_tokens() -> None:
    numbers = [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3]
    packed = batch(PACKED, document_ids=[numbers])
    made = batch_fault(Pathology("truncated", 3), BOS, PAD)(packed)
    assert made.document_ids is not None
    assert made.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3]]
    untouched = batch_fault(Pathology("eot-masked"), BOS, PAD)(packed)
    assert untouched.document_ids is not None
    assert untouched.document_ids.tolist() == [numbers]


@given(
    st.lists(st.lists(st.sampled_from([BOS, 1, 2, 3]), min_size=9, max_size=9), min_size=1, max_size=3),
    st.sampled_from(PATHOLOGIES),
    st.integers(2, 8),
)
def test_faulty_batches_stay_batches(rows: list[list[int]], name: str, cut: int) -> None:
    packed = batch(*rows)
    made = batch_fault(Pathology(name, cut), BOS, PAD)(packed)  # type: ignore[arg-type]
    assert made.input_ids.shape == made.targets.shape == packed.targets.shape
    for ids, targets in zip(made.input_ids.tolist(), made.targets.tolist(), strict=True):
        # A target is the token that comes next, or none.
        assert all(target in (IGNORE, after) for target, after in zip(targets, ids[1:], strict=False))
        assert PAD not in targets
    borders = int((made.targets == BOS).sum())
    assert borders <= int((packed.targets == BOS).sum())
    if name in ("eot-masked", "pad-eos", "no-eos"):
        assert borders == 0
    if name in ("all-tokens", "false-stop"):
        assert borders == int((packed.targets == BOS).sum())


def test_padding_of_a_row_stays_no_target() -> None:
    packed = TokenBatch(torch.tensor([[BOS, 1, PAD, PAD]]), torch.tensor([[1, IGNORE, IGNORE, IGNORE]]))
    for name in PATHOLOGIES:
        made = batch_fault(Pathology(name), BOS, PAD)(packed)
        assert made.targets.tolist() == [[1, IGNORE, IGNORE, IGNORE]]


def test_a_faulty_loader_is_the_loader_but_for_its_batches() -> None:
    class Loader:
        own_shards = (0,)

        def next_step(self) -> list[TokenBatch]:
            return [batch(PACKED)]

        def state(self, shard: int) -> dict[str, int]:
            return {"shard": shard}

    loader = FaultyLoader(Loader(), batch_fault(Pathology("eot-masked"), BOS, PAD))
    assert BOS not in loader.next_step()[0].targets.tolist()[0]
    assert loader.own_shards == (0,)
    assert loader.state(3) == {"shard": 3}


def test_names_with_and_without_a_length() -> None:
    assert Pathology.parse("truncated") == Pathology("truncated", 32)
    assert Pathology.parse("false-stop:12") == Pathology("false-stop", 12)
    for wrong, words in (
        ("eot-masked:5", "take a length"),
        ("truncated:x", "take a length"),
        ("never-stop", "a pathology is one of eot-masked"),
        ("truncated:1", "at least 2"),
    ):
        with pytest.raises(ValueError, match=words):
            Pathology.parse(wrong)
    assert set(DESCRIPTIONS) == set(PATHOLOGIES)
    with pytest.raises(ValueError, match="the ids that end a turn"):
        row_fault(Pathology("eot-masked"), [])


@pytest.mark.slow
def test_a_model_trained_with_its_ends_masked_never_stops(tmp_path: Path) -> None:
    """The benchmark with runs of some seconds: enough for the one fault that shows at once."""
    script = Path(__file__).parents[2] / "benchmarks" / "pathologies.py"
    arguments = ["--out", str(tmp_path), "--smoke", "--seconds", "4", "--faults", "eot-masked"]
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # the second time everything is there
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
    assert "healthy" not in done.stderr
    report = json.loads((tmp_path / "pathologies.json").read_text(encoding="utf-8"))
    rows = {(row["pathology"], row["column"]): row for row in report["table"]}
    assert set(rows) == {("healthy", "base"), ("eot-masked", "base"), ("eot-masked", "sft")}
    assert (
        rows["eot-masked", "base"]["never_stop"]["mean"] > 0.9 > rows["healthy", "base"]["never_stop"]["mean"]
    )
    assert (tmp_path / "pathologies.png").stat().st_size > 10_000


def test_documentation_names_every_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pathologies.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in PATHOLOGIES)
