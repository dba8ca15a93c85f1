"""Rust's tests inside of the code: which changes touch them."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.protected import Protected
from endstop.agent.rust_tests import changed_tests
from endstop.agent.task import Task
from endstop.agent.tree import Trees
from tests.agent.projects import put

CODE = """pub fn add(a: i64, b: i64) -> i64 {
    a - b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "{")]
    fn braces() {
        let text = "}\\""; // }
        assert_eq!(text.len(), 2 /* } */);
        assert_ne!('}', '\\'');
        assert!(r#"}"}"#.len() > 1);
        panic!("{}", add(1, 1));
    }

    #[tokio::test]
    async fn adds() {
        assert_eq!(add(2, 3), 5);
    }

    fn helper() {}
}
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("a - b", "a + b", []),
        ("fn helper() {}", "fn helper() { panic!() }\n\n    #[test]\n    fn more() {}", []),
        ("add(2, 3), 5);", "\n            add(2, 3),\n            5, // now\n        );", []),
        ("    #[tokio::test]", "    #[tokio::test]\n    #[ignore]", []),  # the runner's report tells
        ("fn adds", "fn added", []),  # as it tells of tests that are gone
        ("add(2, 3), 5", "add(2, 3), -1", ["adds"]),
        ("assert_eq!(add(2, 3), 5);", "", ["adds"]),
        ("add(1, 1)", "add(1, 2)", ["braces"]),
        ('"}\\""', '"}\\" "', ["braces"]),
    ],
)
def test_which_tests_changed(old: str, new: str, changed: list[str]) -> None:
    assert old in CODE
    assert changed_tests(CODE.encode(), CODE.replace(old, new).encode()) == changed


def test_they_are_protected(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    trees = Trees(tmp_path / "state", root)
    put(root, {"src/lib.rs": CODE, "src/other.rs": CODE})
    baseline = trees.snapshot()
    put(root, {"src/lib.rs": CODE.replace("3), 5", "3), -1"), "src/other.rs": CODE.replace("a - b", "a + b")})
    tree = trees.snapshot()
    task = Task.model_validate({"task": "x", "verify": {"command": "cargo test", "verifier": "cargo"}})
    assert Protected.of(task).changed(trees, baseline, tree) == (["src/lib.rs::adds"], [])
    assert Protected.of(task).widened([], []).changed(trees, baseline, tree) == (["src/lib.rs::adds"], [])
    opened = Protected.of(task.model_copy(update={"allow": ("src/lib.rs",)}))
    assert opened.changed(trees, baseline, tree) == ([], ["src/lib.rs::adds"])
    python = task.model_copy(update={"verify": task.verify.model_copy(update={"verifier": "pytest"})})
    assert Protected.of(python).changed(trees, baseline, tree) == ([], [])
