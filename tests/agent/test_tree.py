"""Fingerprints: every change counts, nothing in the workspace decides what is kept, exports are exact."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.agent import tree as tree_module
from endstop.agent.tree import Owner, Trees, shown
from endstop.protocol.errors import EndstopError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    return place


@pytest.fixture
def trees(tmp_path: Path, root: Path) -> Trees:
    return Trees(tmp_path / "state", root)


def content_of(root: Path) -> dict[bytes, tuple[str, bytes]]:
    """Kind and content of everything below a directory, read in the plainest way."""
    found: dict[bytes, tuple[str, bytes]] = {}
    base = os.fsencode(root)
    for directory, names, files in os.walk(base):
        for name in names + files:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, base)
            if os.path.islink(path):
                found[relative] = ("link", os.readlink(path))
            elif os.path.isdir(path):
                found[relative] = ("directory", b"")
            else:
                with open(path, "rb") as file:
                    content = file.read()
                found[relative] = ("program" if os.access(path, os.X_OK) else "file", content)
    return found


def test_every_kind_of_change_gives_another_tree(trees: Trees, root: Path) -> None:
    (root / "a.py").write_text("1\n")
    seen = [trees.snapshot()]
    (root / "a.py").write_text("2\n")
    seen.append(trees.snapshot())
    (root / "a.py").chmod(0o755)
    seen.append(trees.snapshot())
    (root / "empty").touch()
    seen.append(trees.snapshot())
    (root / "empty").rename(root / "other")
    seen.append(trees.snapshot())
    (root / "directory").mkdir()
    seen.append(trees.snapshot())
    (root / "link").symlink_to("a.py")
    seen.append(trees.snapshot())
    (root / "link").unlink()
    (root / "link").symlink_to("other")
    seen.append(trees.snapshot())
    assert len(set(seen)) == len(seen)
    shutil.rmtree(root / "directory")
    for name in ("link", "other"):
        (root / name).unlink()
    (root / "a.py").chmod(0o644)
    assert trees.snapshot() == seen[1]
    assert [trees.changed(a, b) for a, b in itertools.pairwise(seen)] == [
        ["a.py"],
        ["a.py"],
        ["empty"],
        ["empty", "other"],
        ["directory"],
        ["link"],
        ["link"],
    ]


def test_a_change_that_keeps_size_and_times_is_seen(trees: Trees, root: Path) -> None:
    path = root / "a.py"
    path.write_text("a - b\n")
    os.utime(path, ns=(10**18, 10**18))
    before = trees.snapshot()
    path.write_text("a + b\n")
    os.utime(path, ns=(10**18, 10**18))
    after = trees.snapshot()
    assert after != before
    assert trees.read(after, "a.py") == b"a + b\n"


def test_only_what_changed_is_read_again(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "_TRUSTED_AGE", 0)
    for number in range(20):
        (root / f"{number}.txt").write_text(str(number))
    first = Trees(tmp_path / "state", root).snapshot()
    opened: list[str] = []
    real = tree_module.open_regular

    def counted(name: str, directory: int) -> int | None:
        opened.append(name)
        return real(name, directory)

    monkeypatch.setattr(tree_module, "open_regular", counted)
    again = Trees(tmp_path / "state", root)
    assert again.snapshot() == first
    assert opened == []
    (root / "7.txt").write_text("8")
    assert again.changed(first, again.snapshot()) == ["7.txt"]
    assert opened == ["7.txt"]


def test_the_workspace_does_not_decide_what_is_kept(trees: Trees, root: Path) -> None:
    (root / ".gitignore").write_text("*\n")
    (root / ".gitattributes").write_text(
        "* text=auto eol=crlf ident filter=evil working-tree-encoding=UTF-16 export-ignore\n"
    )
    (root / "a.txt").write_bytes(b"one\r\ntwo\n$Id$\n")
    nested = root / "vendor" / "nested"
    nested.mkdir(parents=True)
    (nested / "code.py").write_text("x = 1\n")
    for place in (root, nested):
        subprocess.run(["git", "init", "-q", str(place)], check=True)
        with (place / ".git" / "config").open("a") as config:
            config.write(
                '[core]\n\tfsmonitor = "touch ran"\n\tautocrlf = true\n'
                '[filter "evil"]\n\tclean = "touch ran"\n\trequired = true\n'
            )
        hooks = place / ".git" / "hooks"
        hooks.mkdir(exist_ok=True)
        for hook in ("pre-commit", "post-index-change"):
            (hooks / hook).write_text("#!/bin/sh\ntouch ran\n")
            (hooks / hook).chmod(0o755)
    first = trees.snapshot()
    assert sorted(trees.paths(first)) == [
        ".gitattributes",
        ".gitignore",
        "a.txt",
        "vendor/nested/code.py",
    ]
    assert trees.read(first, "a.txt") == b"one\r\ntwo\n$Id$\n"
    (root / "a.txt").write_bytes(b"one\ntwo\n$Id$\n")
    assert trees.snapshot() != first
    assert trees.diff(first, trees.snapshot()).count("one") == 2
    assert list(root.rglob("ran")) == []


def test_git_settings_of_the_environment_change_nothing(
    trees: Trees, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a.txt").write_text("old\n")
    before = trees.snapshot()
    (root / "a.txt").write_text("new\n")
    after = trees.snapshot()
    expected = trees.diff(before, after)
    assert "-old\n+new\n" in expected
    ran = tmp_path / "ran"
    script = tmp_path / "differ"
    script.write_text(f"#!/bin/sh\ntouch {ran}\n")
    script.chmod(0o755)
    settings_file = tmp_path / "gitconfig"
    settings_file.write_text(
        f"[diff]\n\texternal = {script}\n\tnoprefix = true\n[core]\n\tpager = {script}\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings_file))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(script))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "elsewhere"))
    assert trees.diff(before, after) == expected
    assert not ran.exists()


def test_git_reads_the_store_as_its_own(trees: Trees, root: Path, tmp_path: Path) -> None:
    (root / "b").mkdir()
    (root / "b" / "c").write_text("c")
    (root / "b.txt").write_text("sorted before the directory b/")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "link").symlink_to("b")
    tree = trees.snapshot()
    store = tmp_path / "state" / "trees.git"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", f"--git-dir={store}", *arguments], check=True, capture_output=True, text=True
        ).stdout

    assert git("cat-file", "-t", tree) == "tree\n"
    listed = git("ls-tree", "-r", tree)
    assert git("mktree", "--missing") != tree
    made = subprocess.run(
        ["git", f"--git-dir={store}", "mktree"],
        input=git("ls-tree", tree),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert made.strip() == tree
    assert [line.split()[0] for line in listed.splitlines()] == ["100644", "100644", "120000", "100755"]
    problems = subprocess.run(
        ["git", f"--git-dir={store}", "fsck", "--strict", "--no-dangling"], capture_output=True, text=True
    )
    assert problems.returncode == 0, problems.stderr


NAMES = st.binary(min_size=1, max_size=8).filter(
    lambda name: (
        b"/" not in name and b"\0" not in name and name not in (b".", b"..") and name.lower() != b".git"
    )
)
CONTENTS = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=40)),
    st.tuples(st.just("program"), st.binary(max_size=40)),
    st.tuples(st.just("link"), st.binary(min_size=1, max_size=20).filter(lambda name: b"\0" not in name)),
    st.tuples(st.just("directory"), st.just(b"")),
)
WORKSPACES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map(tuple), CONTENTS, max_size=8)


def build(root: bytes, wanted: dict[tuple[bytes, ...], tuple[str, bytes]]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    os.mkdir(root)
    for parts, (kind, content) in wanted.items():
        path = os.path.join(root, *parts)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if kind == "directory":
                os.makedirs(path, exist_ok=True)
            elif kind == "link":
                os.symlink(content, path)
            else:
                with open(path, "xb") as file:
                    file.write(content)
                os.chmod(path, 0o755 if kind == "program" else 0o644)
        except OSError:
            continue  # a file is in the way, or a link leads away


@settings(max_examples=60, deadline=None)
@given(before=WORKSPACES, after=WORKSPACES)
def test_what_is_exported_is_what_was_there(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[tuple[bytes, ...], tuple[str, bytes]],
    after: dict[tuple[bytes, ...], tuple[str, bytes]],
) -> None:
    place = tmp_path_factory.mktemp("trees")
    root = place / "workspace"
    build(os.fsencode(root), before)
    trees = Trees(place / "state", root)
    first, there = trees.snapshot(), content_of(root)
    trees.export(first, place / "first")
    assert content_of(place / "first") == there
    assert trees.tree_of(trees.entries(first)) == first

    build(os.fsencode(root), after)
    second, then = trees.snapshot(), content_of(root)
    assert (second == first) == (there == then)
    old, new = trees.entries(first), trees.entries(second)
    apart = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
    # An empty directory that is filled, or emptied, shows by what was in it.
    named = set(trees.changed(first, second))
    assert named <= apart
    assert all(old.get(path, new.get(path)).mode == "40000" for path in apart - named)  # type: ignore[union-attr]
    assert bool(trees.diff(first, second)) == any(
        entry.mode != "40000" for path in apart for entry in (old.get(path), new.get(path)) if entry
    )

    trees.restore(first)
    assert content_of(root) == there
    assert trees.snapshot() == first


def test_odd_names(trees: Trees, root: Path, tmp_path: Path) -> None:
    names = [b"new\nline", b"not \xff utf-8", b"-rf", b'quote"s', b" space ", b"tab\t", b"\\n", b"a" * 255]
    for name in names:
        with open(os.path.join(os.fsencode(root), name), "wb") as file:
            file.write(name)
    tree = trees.snapshot()
    assert sorted(map(os.fsencode, trees.paths(tree))) == sorted(names)
    assert trees.read(tree, os.fsdecode(b"not \xff utf-8")) == b"not \xff utf-8"
    trees.export(tree, tmp_path / "export")
    assert content_of(tmp_path / "export") == content_of(root)
    assert shown(os.fsdecode(b"not \xff\nutf-8")) == "not \\udcff\\nutf-8"
    # Kept between processes too.
    again = Trees(tmp_path / "state", root)
    assert again.snapshot() == tree


def test_links_are_kept_and_never_followed(trees: Trees, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("do not keep\n")
    (root / "file").symlink_to(outside / "secret")
    (root / "directory").symlink_to(outside)
    (root / "dangling").symlink_to("/nowhere")
    (root / "loop").symlink_to("loop")
    tree = trees.snapshot()
    assert trees.read(tree, "file") == os.fsencode(outside / "secret")
    assert trees.read(tree, "directory/secret") is None
    trees.export(tree, tmp_path / "export")
    assert (tmp_path / "export" / "directory").is_symlink()

    # What is restored goes into the workspace, not where a link leads.
    (root / "directory").unlink()
    (root / "directory").mkdir()
    (root / "directory" / "secret").write_text("mine\n")
    mine = trees.snapshot()
    shutil.rmtree(root / "directory")
    (root / "directory").symlink_to(outside)
    trees.restore(mine)
    assert (root / "directory" / "secret").read_text() == "mine\n"
    assert (outside / "secret").read_text() == "do not keep\n"


def test_pipes_sockets_and_devices_neither_hang_nor_count(trees: Trees, root: Path) -> None:
    (root / "a").write_text("a")
    before = trees.snapshot()
    os.mkfifo(root / "pipe")
    assert trees.snapshot() == before
    assert trees.left_out == {"pipe": "neither a file nor a directory nor a link"}


def test_what_is_too_large_or_too_deep_is_left_out_and_named(
    trees: Trees, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trees.snapshot()
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert trees.snapshot() == before
    assert trees.left_out == {"sparse": "larger than 512 MiB"}
    (root / "sparse").unlink()
    here = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    trees.snapshot()
    assert list(trees.left_out.values()) == ["more than 100 directories deep"]
    # Removed again without a limit of calls or of open directories (pytest's own way would meet one).
    trees.restore(before)
    assert list(root.iterdir()) == []


def test_large_files_are_kept_in_pieces(trees: Trees, root: Path, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 3 + b"end"
    (root / "large.bin").write_bytes(content)
    tree = trees.snapshot()
    assert trees.read(tree, "large.bin") == content
    trees.export(tree, tmp_path / "export")
    assert (tmp_path / "export" / "large.bin").read_bytes() == content


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_left_out_as_a_user(trees: Trees, root: Path) -> None:
    (root / "closed").write_text("x")
    (root / "closed").chmod(0)
    trees.snapshot()
    assert trees.left_out == {"closed": "cannot be read: Permission denied"}


def test_caches_and_dependencies_are_no_part_of_a_tree(tmp_path: Path, root: Path) -> None:
    trees = Trees(tmp_path / "state", root, exclude=["node_modules", "web/.venv/"])
    (root / "a.py").write_text("a")
    before = trees.snapshot()
    for path in ("node_modules/x.js", "web/.venv/bin/python", "pkg/__pycache__/a.pyc", ".pytest_cache/v"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")
    assert trees.changed(before, trees.snapshot()) == ["pkg", "web"]
    # By the path that was named, not by a name anywhere.
    (root / "pkg" / "node_modules").mkdir()
    (root / "pkg" / "node_modules" / "y.js").write_text("y")
    assert "pkg/node_modules/y.js" in trees.paths(trees.snapshot())


def test_restore_after_everything_was_deleted(trees: Trees, root: Path) -> None:
    (root / "pkg").mkdir()
    (root / "pkg" / "a.py").write_text("a")
    (root / "pkg" / "run").write_text("#!/bin/sh\n")
    (root / "pkg" / "run").chmod(0o755)
    tree = trees.snapshot()
    shutil.rmtree(root / "pkg")
    assert trees.restore(tree) == ["pkg/a.py", "pkg/run"]
    assert stat.S_IMODE((root / "pkg" / "run").stat().st_mode) == 0o755
    assert trees.restore(tree) == []


def test_restore_removes_what_came_later_with_its_caches(trees: Trees, root: Path) -> None:
    (root / "a").write_text("a")
    tree = trees.snapshot()
    (root / "new" / "__pycache__").mkdir(parents=True)
    (root / "new" / "b").write_text("b")
    (root / "new" / "__pycache__" / "b.pyc").write_text("b")
    (root / "a").unlink()
    (root / "a").mkdir()
    os.mkfifo(root / "a" / "pipe")
    trees.restore(tree)
    assert sorted(path.name for path in root.iterdir()) == ["a"]
    assert (root / "a").read_text() == "a"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_belong_to_whom_they_are_exported_for(trees: Trees, root: Path, tmp_path: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "a").write_text("a")
    (root / "link").symlink_to("/etc/passwd")
    trees.export(trees.snapshot(), tmp_path / "export", owner=Owner(61234, 61234))
    for path in ("", "d", "d/a", "link"):
        assert (tmp_path / "export" / path).lstat().st_uid == 61234
    assert Path("/etc/passwd").stat().st_uid == 0
    # What is restored belongs to whom the workspace belongs to.
    os.chown(root, 61234, 61234)
    tree = trees.snapshot()
    shutil.rmtree(root / "d")
    trees.restore(tree)
    assert (root / "d" / "a").stat().st_uid == (root / "d").stat().st_uid == 61234


def test_two_at_once(tmp_path: Path, root: Path) -> None:
    for number in range(200):
        (root / f"{number}").write_text(str(number) * 100)
    made: list[str] = []
    workers = [
        threading.Thread(target=lambda: made.append(Trees(tmp_path / "state", root).snapshot()))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    trees = Trees(tmp_path / "state", root)
    trees.export(made[0], tmp_path / "export")
    assert content_of(tmp_path / "export") == content_of(root)
    assert [path.name for path in (tmp_path / "state").rglob(".*")] == []


def test_a_damaged_state_is_named(trees: Trees, root: Path, tmp_path: Path) -> None:
    (root / "a").write_text("a" * 100)
    tree = trees.snapshot()
    kept = tmp_path / "state" / "trees.git" / "objects"
    object_id = trees.paths(tree)["a"]
    path = kept / object_id[:2] / object_id[2:]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(EndstopError, match="cut off"):
        trees.read(tree, "a")
    (tmp_path / "state" / "stamps.json").write_text("{not json")
    assert Trees(tmp_path / "state", root).snapshot() == tree


def test_the_state_may_not_lie_in_the_workspace(root: Path) -> None:
    with pytest.raises(EndstopError, match="must not lie in the workspace"):
        Trees(root / ".endstop", root)


def test_an_export_goes_into_an_empty_directory_only(trees: Trees, root: Path, tmp_path: Path) -> None:
    (root / "a").write_text("a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "b").write_text("b")
    with pytest.raises(EndstopError, match="is not empty"):
        trees.export(trees.snapshot(), tmp_path / "full")


def test_a_difference_is_bounded(trees: Trees, root: Path) -> None:
    before = trees.snapshot()
    (root / "a").write_text("line\n" * 10_000)
    after = trees.snapshot()
    short = trees.diff(before, after, limit=1000)
    assert short.endswith("\n[the rest of the difference is left out]\n")
    assert len(short) < 1100


def test_directories_without_rights_are_removed(trees: Trees, root: Path) -> None:
    tree = trees.snapshot()
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "c").write_text("c")
    trees.snapshot()
    (root / "a" / "b").chmod(0o500)
    (root / "a").chmod(0o500)
    trees.restore(tree)
    assert list(root.iterdir()) == []


def test_present_are_files_and_links_that_lead_to_something_inside(trees: Trees, root: Path) -> None:
    (root / "docs").mkdir()
    (root / "docs" / "a.md").write_text("a\n")
    (root / "empty").mkdir()
    links = {
        "file": "docs/a.md",
        "folder": "docs",
        "docs/up": "../file",
        "outside": "/etc/passwd",
        "climbs": "../../etc/passwd",
        "dangling": "docs/b.md",
        "to_empty": "empty",
        "itself": "itself",
        "around": "docs/../docs/a.md",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    assert trees.present(trees.snapshot()) == {"docs/a.md", "file", "folder", "docs/up", "around"}
