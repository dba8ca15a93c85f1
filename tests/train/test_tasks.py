"""Tasks: what they ask, what they accept, where train ends and test begins."""

from __future__ import annotations

from importlib.util import find_spec
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.protocol.errors import EndstopError
from endstop.runtime.tools import calculate
from endstop.train.tasks import (
    HARD,
    SYNTHETIC,
    Example,
    GeneratedCorpus,
    Task,
    TaskExamples,
    TaskSource,
    registry,
    split_of,
    task_named,
    visible,
)
from endstop.train.tasks.brackets import CLOSING, draw_close
from endstop.train.tasks.dictionary import QUALITIES, THINGS
from endstop.train.tasks.strings import draw_until
from endstop.train.tasks.words import system_words

GENERATED = [task for name, task in registry.items() if not name.startswith("gym-")]
names = st.sampled_from([task.name for task in GENERATED])


def prompts(example: Example) -> list[str]:
    return [message["content"] for message in example.messages if message["role"] == "user"]


@settings(max_examples=200, deadline=None)
@given(names, st.integers(0, 5), st.integers(0, 10_000), st.sampled_from(["train", "test"]))
def test_examples_are_pure_and_every_prompt_lies_on_its_side(name, seed, index, split):
    task = registry[name]
    example = task.example(seed, index, split)
    assert example == task.example(seed, index, split)
    assert {split_of(prompt) for prompt in prompts(example)} == {split}
    roles = [message["role"] for message in example.conversation]
    assert roles == ["user", "assistant"] * (len(roles) // 2)


@settings(max_examples=200, deadline=None)
@given(names, st.integers(0, 10_000))
def test_the_right_answer_scores_and_one_that_ends_elsewhere_does_not(name, index):
    task = registry[name]
    example = task.example(0, index, "test")
    gold = visible(example.answer)
    assert task.score(example, gold)
    if not example.ends:
        return
    assert not task.score(example, gold + " ")
    assert not task.score(example, gold + "x")
    if gold:
        assert not task.score(example, gold[:-1])
        assert not task.score(example, "")


def test_seeds_and_indices_give_different_examples():
    task = task_named("until")
    drawn = {task.example(seed, index, "train").drawn.prompt for seed in range(3) for index in range(100)}
    assert len(drawn) > 280


@pytest.mark.parametrize("task", GENERATED, ids=lambda task: task.name)
def test_calls_hold_what_the_calculator_answers(task):
    for index in range(50):
        for message in task.example(1, index, "train").conversation:
            if isinstance(message["content"], str):
                continue
            parts = message["content"]
            for part, following in zip(parts, [*parts[1:], None], strict=True):
                if part["type"] == "python":
                    assert following == {"type": "python_output", "text": calculate(part["text"])}


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("echo", r"say (\w+)", lambda word: word),
        ("spell", r"spell (\w+)", ",".join),
        ("repeat", r"repeat (\d) (\w+)", lambda count, item: " ".join([item] * int(count))),
        ("first", r"first (\d) of (.*)", lambda count, rest: " ".join(rest.split()[: int(count)])),
        ("empty", r"first 0 of .*", lambda: ""),
        ("until", r"until (\w) (\w+)", lambda c, w: w[: w.index(c) + 1] if c in w else "none"),
        ("absent", r"until (\w) (?!.*\1)\w+", lambda _: "none"),
        ("count", r"count (\d+) to (\d+)", lambda a, b: " ".join(map(str, range(int(a), int(b) + 1)))),
        ("define", r"define (\w+)", lambda word: definition(word)),
    ],
)
def test_answers_follow_from_their_prompts(name, prompt, answer):
    import re

    for index in range(100):
        example = task_named(name).example(2, index, "train")
        found = re.fullmatch(prompt, example.drawn.prompt)
        assert found, example.drawn.prompt
        assert example.answer == answer(*found.groups())


def definition(word: str) -> str:
    qualities, thing = word[:-3], word[-3:]
    meanings = [QUALITIES[qualities[at : at + 2]] for at in range(0, len(qualities), 2)]
    return f"a {' '.join([*meanings, THINGS[thing]])}."


def test_the_place_of_the_first_hit_is_uniform():
    random = Random(0)
    lengths = [len(draw_until(random, length=(4, 4), absent=0.0).answer) for _ in range(4000)]
    for length in (1, 2, 3, 4):
        assert 900 < lengths.count(length) < 1100


def test_brackets_are_balanced_by_their_answer():
    random = Random(1)
    for _ in range(200):
        drawn = draw_close(random)
        stack = []
        for bracket in drawn.prompt.removeprefix("close ") + drawn.answer:
            if bracket in CLOSING:
                stack.append(CLOSING[bracket])
            else:
                assert stack.pop() == bracket
        assert not stack


def test_letter_counts_are_those_of_the_word():
    for index in range(50):
        example = task_named("letters").example(0, index, "train")
        target, word = example.drawn.prompt.removeprefix("how many ").split(" in ")
        trace, count = example.answer.split("=")
        assert int(count) == word.count(target)
        assert trace[::2] == word


def test_a_list_may_have_any_members_but_exactly_as_many():
    task = Task("list-3", registry["list"].draw, "", {"count": (3, 3)})
    example = next(e for e in (task.example(0, i, "train") for i in range(100)) if "trees" in e.drawn.prompt)
    assert example.answer == "oak, elm, ash"
    assert task.score(example, "willow, oak, fir")
    for wrong in ("oak, elm", "oak, elm, ash, fir", "oak, oak, elm", "oak, elm, iron", "oak, elm, ash,", ""):
        assert not task.score(example, wrong)


def test_of_a_story_only_the_end_must_be_right():
    task = task_named("story")
    example = task.example(0, 3, "train")
    result = visible(example.answer).rpartition("#### ")[2]
    assert task.score(example, f"by another way #### {result}")
    for wrong in (f"#### {result}0", f"#### {result}.", f"#### {result}\n", result, f"#### {result} #### 1"):
        assert not task.score(example, wrong)


def test_an_identity_question_accepts_each_of_its_answers():
    task = task_named("identity")
    example = next(e for e in (task.example(0, i, "test") for i in range(300)) if len(e.drawn.accepted) > 1)
    assert all(task.score(example, text) for text in example.drawn.accepted)


def test_the_probe_of_a_stop_by_content_never_asks_for_what_is_absent() -> None:
    examples = [task_named("until-present").example(0, index, "test") for index in range(300)]
    assert all(example.answer != "none" for example in examples)
    assert all(example.messages[-1]["content"].split()[1] == example.answer[-1] for example in examples)


def test_without_an_end_only_the_beginning_is_judged():
    task = task_named("count-on")
    example = task.example(0, 0, "train")
    first = int(example.drawn.prompt.split()[1])
    assert not example.ends
    assert task.score(example, f"{first} {first + 1}")
    assert not task.score(example, f"{first} {first + 2}")


def test_hard_answers_are_longer_than_any_of_the_plain_task():
    for hard in HARD:
        if hard.name in ("until-hard", "story-hard", "calc-hard", "first-hard"):
            continue  # there the prompt grows, the answer need not
        plain = task_named(hard.name.removesuffix("-hard"))
        longest = max(len(visible(plain.example(0, index, "train").answer)) for index in range(1000))
        shortest = min(len(visible(hard.example(0, index, "train").answer)) for index in range(300))
        units = {"repeat-hard": 3, "count-hard": 2, "spell-hard": 1, "letters-hard": 1}.get(hard.name, 1)
        assert shortest * units > longest, hard.name


def test_turns_are_answered_in_their_history():
    example = task_named("turns").example(0, 0, "train")
    assert len(example.messages) in (3, 5)
    assert example.messages[1]["role"] == "assistant"
    assert example.document.count("\n") == len(example.messages)


def test_documents_spell_calls_as_text():
    example = task_named("calc").example(0, 0, "train")
    expression, result = example.answer[0]["text"], example.answer[1]["text"]
    assert example.document == f"{example.drawn.prompt}\n{expression}={result} {result}"


def test_a_task_without_instances_on_a_side_says_so():
    with pytest.raises(EndstopError, match="the task one has too few instances to have any on its test side"):
        Task("one", lambda random: task_named("echo").example(0, 0, "train").drawn, "").example(0, 0, "test")


def test_unknown_task():
    with pytest.raises(EndstopError, match="there is no task 'sing'; tasks are echo, spell"):
        task_named("sing")


def test_a_mixture_has_the_shares_of_its_weights():
    source = TaskExamples({"echo": 1.0, "until": 3.0}, seed=0, split="train", size=2000)
    assert len(source) == 2000
    share = sum(source[index].task == "until" for index in range(2000)) / 2000
    assert 0.72 < share < 0.78
    with pytest.raises(IndexError):
        source[2000]


@pytest.mark.parametrize(
    ("weights", "size"), [({}, 1), ({"echo": 0.0}, 1), ({"echo": -1.0, "spell": 2.0}, 1), ({"echo": 1.0}, 0)]
)
def test_bad_mixtures(weights, size):
    with pytest.raises(EndstopError):
        TaskSource(weights, seed=0, split="train", size=size)


def test_sources_are_random_access_and_have_no_test_prompt():
    weights = {task.name: 1.0 for task in SYNTHETIC}
    chats = TaskSource(weights, seed=3, split="train", size=500)
    assert chats[17] == chats[17]
    for index in range(300):
        for message in chats[index]:
            if message["role"] == "user":
                assert split_of(message["content"]) == "train"
    corpus = GeneratedCorpus({"entry": 1.0, "count": 1.0}, seed=3, split="train", size=100)
    entries = [text for text in (corpus[index] for index in range(100)) if not text.startswith("count")]
    assert entries
    for text in entries:
        word, meaning = text.split(": ")
        assert meaning == definition(word)


def test_bee_takes_a_word_list(tmp_path):
    listed = tmp_path / "words"
    listed.write_text("strawberry\nOslo\nox\nit's\nbookkeeper\n", encoding="utf-8")
    words = system_words(listed)
    assert words == ("strawberry", "bookkeeper")
    assert system_words(tmp_path / "absent") == ()
    example = registry["bee"].with_knobs("bee-real", words=words).example(0, 0, "train")
    word = example.drawn.prompt.removesuffix("?").split()[-1]
    assert word in words
    assert example.answer[1]["text"].startswith(f"'{word}'.count(")


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
@pytest.mark.parametrize("name", ["gym-chain-sum", "gym-number-sequence", "gym-basic-arithmetic"])
def test_gym_tasks_score_with_their_own_verifiers(name):
    task = task_named(name)
    example = task.example(0, 0, "test")
    assert example == task.example(0, 0, "test")
    assert split_of(example.drawn.prompt) == "test"
    assert task.score(example, visible(example.answer))
    assert not task.score(example, "no idea")
