"""The fingerprint of a workspace, and the trees behind it: what evidence is about.

A tree id stands for every file's content, name and executable bit, and for links and empty directories.
Nothing of the workspace decides what is in it: no .gitignore, no .gitattributes, no git repository of the
agent's, at the top or further in. Left out are version control's own directories, caches that tools write,
and what the caller excludes (dependencies); what cannot be read is left out too, and listed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from endstop.agent.object_store import Entry, Mode, ObjectStore, open_regular
from endstop.agent.removal import remove
from endstop.protocol.errors import EndstopError

# By name, wherever they are: written by tools, read by none as a source.
CACHES = frozenset(
    (".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")
)
# A file larger than this is left out: reading it at every step would stop the run.
FILE_LIMIT = 512 << 20
# Directories deeper than this are left out: each level holds a descriptor.
DEPTH_LIMIT = 100
DIFF_LIMIT = 1 << 20

# A file changed so shortly before it was read may change again without a trace in its times.
_TRUSTED_AGE = 100_000_000
# As many as Linux follows.
_MOST_LINKS = 40
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Stamp = tuple[int, int, int, int, int]
Nested = dict[str, "Entry | Nested"]


def shown(path: str) -> str:
    """A path as it may be printed: bytes that are no text, and control characters, are spelled out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in path
    )


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom exported or restored files belong to."""

    uid: int
    gid: int


class Trees:
    """Trees of one workspace, kept under `state`, which must lie outside of it.

    Paths are as `os.fsdecode` gives them, with `/`. A state may be shared by processes.

    Attributes:
        left_out: of the last snapshot, path to the reason.
    """

    def __init__(self, state: Path, root: Path, *, exclude: Sequence[str] = ()) -> None:
        self.root, state = root.resolve(), state.resolve()  # git does not run in our directory
        if state.is_relative_to(self.root):
            raise EndstopError(f"the state {state} must not lie in the workspace {root}")
        self._store = ObjectStore(state / "trees.git")
        self._exclude = frozenset(path.strip("/") for path in exclude)
        self._stamps_file = state / "stamps.json"
        self._stamps = _load_stamps(self._stamps_file)
        self.left_out: dict[str, str] = {}
        self._times: dict[str, tuple[str, int]] = {}

    def snapshot(self) -> str:
        """Keep the workspace as it is now and return its tree id."""
        walk = _Walk(self._store, self._exclude, self._stamps)
        try:
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise EndstopError(f"the workspace {self.root} cannot be read: {error.strerror}") from error
        try:
            tree = walk.directory(descriptor, "", 0)
        finally:
            os.close(descriptor)
        self.left_out, self._times = walk.left_out, walk.times
        if walk.stamps != self._stamps:
            self._stamps = walk.stamps
            _save_stamps(self._stamps_file, walk.stamps)
        return tree

    def entries(self, tree: str) -> dict[str, Entry]:
        """Every file, link and empty directory of a tree."""
        return dict(self._flat(tree, ""))

    def paths(self, tree: str) -> dict[str, str]:
        """Every file and link, with the id of its content."""
        return {path: entry.object_id for path, entry in self._flat(tree, "") if entry.mode != "40000"}

    def present(self, tree: str) -> set[str]:
        """Every file, and every link that leads to something in the tree: none that dangles or leads out."""
        entries = self.entries(tree)
        folders = {path[:place] for path in entries for place, char in enumerate(path) if char == "/"}

        def leads_somewhere(path: str, hops: int) -> bool:
            entry = entries.get(path)
            if entry is None or entry.mode != "120000":
                return path in folders if entry is None else entry.mode != "40000"
            target = os.fsdecode(self._store.content(entry.object_id))
            inside = os.path.normpath(os.path.join(os.path.dirname(path), target))
            leads_out = os.path.isabs(target) or inside.startswith("..")
            return hops > 0 and not leads_out and leads_somewhere(inside, hops - 1)

        return {path for path in entries if leads_somewhere(path, _MOST_LINKS)}

    def tree_of(self, entries: Mapping[str, Entry]) -> str:
        """The tree that has just these entries. The inverse of `entries`."""
        nested: Nested = {}
        for path, entry in entries.items():
            *directories, name = path.split("/")
            place = nested
            for directory in directories:
                inner = place.setdefault(directory, {})
                if isinstance(inner, Entry):
                    raise ValueError(f"{path} stands below a file")
                place = inner
            # An empty directory may be filled by another entry.
            if entry.mode == "40000":
                place.setdefault(name, {})
            else:
                place[name] = entry
        return self._add_nested(nested)

    def read(self, tree: str, path: str) -> bytes | None:
        """What a file of a tree holds (for a link: where it leads). None where there is none."""
        entry = self.entry(tree, path)
        return None if entry is None or entry.mode == "40000" else self._store.content(entry.object_id)

    def entry(self, tree: str, path: str) -> Entry | None:
        """What a tree has at a path, directories included."""
        found = Entry("40000", tree)
        for name in path.strip("/").split("/"):
            if found.mode != "40000":
                return None
            there = dict(self._store.tree(found.object_id)).get(os.fsencode(name))
            if there is None:
                return None
            found = there
        return found

    def changed(self, before: str, after: str) -> list[str]:
        """Paths that differ: changed, added or gone, in order."""
        return sorted(self._differing(before, after, ""))

    def diff(self, before: str, after: str, *, limit: int = DIFF_LIMIT) -> str:
        """The difference as a patch, cut where it is longer than `limit` bytes."""
        if before == after:
            return ""
        text, cut = self._store.git(
            "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", before, after, limit=limit
        )
        return f"{text}\n[the rest of the difference is left out]\n" if cut else text

    def export(self, tree: str, destination: Path, *, owner: Owner | None = None) -> None:
        """Write a tree into a directory that is new or empty.

        Files that are as the last snapshot found them keep their time of change, so that what was built from
        them is as new or as old as it was; all others are new.
        """
        destination.mkdir(parents=True, exist_ok=True)
        if any(destination.iterdir()):
            raise EndstopError(f"{destination} is not empty: a tree is exported into a new directory")
        self._export(tree, str(destination), owner, "")

    def restore(self, tree: str) -> list[str]:
        """Make the workspace a tree again, but for what is left out. Returns the paths that differed."""
        status = self.root.stat()
        owner = Owner(status.st_uid, status.st_gid) if os.geteuid() == 0 else None
        differed: set[str] = set()
        # Twice: directories that hold nothing but caches are seen to be empty, and missing, only then.
        for _ in range(2):
            now = self.snapshot()
            have, want = self.entries(now), self.entries(tree)
            changed = self.changed(now, tree)
            differed.update(changed)
            try:
                for path in changed:
                    if path in have:
                        _remove(self.root, path)
                for path in changed:
                    if path in want:
                        self._restore_one(path, want[path], owner)
            except OSError as error:
                raise EndstopError(f"the workspace {self.root} cannot be restored: {error}") from error
        return sorted(differed)

    def _flat(self, tree: str, prefix: str) -> Iterator[tuple[str, Entry]]:
        inside = self._store.tree(tree)
        if not inside and prefix:
            yield prefix[:-1], Entry("40000", tree)
        for raw, entry in inside:
            path = prefix + os.fsdecode(raw)
            if entry.mode == "40000":
                yield from self._flat(entry.object_id, path + "/")
            else:
                yield path, entry

    def _differing(self, before: str | None, after: str | None, prefix: str) -> Iterator[str]:
        if before == after:
            return
        old = dict(self._store.tree(before)) if before else {}
        new = dict(self._store.tree(after)) if after else {}
        # A directory is named only where it comes or goes as an empty one; else what is in it is named.
        if prefix and ((after is None and not old) or (before is None and not new)):
            yield prefix[:-1]
        for raw in old.keys() | new.keys():
            a, b = old.get(raw), new.get(raw)
            if a == b:
                continue
            path = prefix + os.fsdecode(raw)
            if any(side is not None and side.mode != "40000" for side in (a, b)):
                yield path
            inner = [side.object_id if side is not None and side.mode == "40000" else None for side in (a, b)]
            yield from self._differing(inner[0], inner[1], path + "/")

    def _add_nested(self, nested: Nested) -> str:
        return self._store.add_tree(
            (
                os.fsencode(name),
                there if isinstance(there, Entry) else Entry("40000", self._add_nested(there)),
            )
            for name, there in nested.items()
        )

    def _export(self, tree: str, destination: str, owner: Owner | None, prefix: str) -> None:
        # Not by path from the top: a directory is entered only once it is made, and nothing else runs yet.
        for raw, entry in self._store.tree(tree):
            name = os.fsdecode(raw)
            path = f"{destination}/{name}"
            if entry.mode == "40000":
                os.mkdir(path)
                self._export(entry.object_id, path, owner, f"{prefix}{name}/")
                continue
            if entry.mode == "120000":
                os.symlink(self._store.content(entry.object_id), os.fsencode(path))
            else:
                descriptor = os.open(path, _NEW_FILE, 0o600)
                try:
                    self._store.write_to(descriptor, entry.object_id)
                    os.fchmod(descriptor, 0o755 if entry.mode == "100755" else 0o644)
                    object_id, changed = self._times.get(prefix + name, ("", 0))
                    if object_id == entry.object_id:
                        os.utime(descriptor, ns=(changed, changed))
                finally:
                    os.close(descriptor)
            _give(path, owner)
        os.chmod(destination, 0o755)
        _give(destination, owner)

    def _restore_one(self, path: str, entry: Entry, owner: Owner | None) -> None:
        *parents, name = path.split("/")
        with _entered(self.root, parents, owner) as directory:
            if entry.mode == "40000":
                with _entered(self.root, [*parents, name], owner):
                    return
            remove(directory, name)
            if entry.mode == "120000":
                os.symlink(self._store.content(entry.object_id), os.fsencode(name), dir_fd=directory)
            else:
                beside = f".{uuid4().hex}"
                descriptor = os.open(beside, _NEW_FILE, 0o600, dir_fd=directory)
                try:
                    self._store.write_to(descriptor, entry.object_id)
                    os.fchmod(descriptor, 0o755 if entry.mode == "100755" else 0o644)
                finally:
                    os.close(descriptor)
                os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
            if owner is not None:
                os.chown(name, owner.uid, owner.gid, dir_fd=directory, follow_symlinks=False)


class _Walk:
    """One snapshot on its way: reads only what has changed since the stamps were taken."""

    def __init__(
        self, store: ObjectStore, exclude: frozenset[str], known: Mapping[str, tuple[Stamp, str]]
    ) -> None:
        self._store, self._exclude, self._known = store, exclude, known
        self._began = time.time_ns()
        self.stamps: dict[str, tuple[Stamp, str]] = {}
        self.left_out: dict[str, str] = {}
        self.times: dict[str, tuple[str, int]] = {}

    def directory(self, descriptor: int, prefix: str, depth: int) -> str:
        entries = []
        with os.scandir(descriptor) as found:
            names = [entry.name for entry in found]
        for name in names:
            path = prefix + name
            if name.lower() in CACHES or path in self._exclude:
                continue
            try:
                entry = self._entry(descriptor, name, path, depth)
            except OSError as error:
                self.left_out[path] = f"cannot be read: {error.strerror}"
                continue
            if isinstance(entry, Entry):
                entries.append((os.fsencode(name), entry))
            else:
                self.left_out[path] = entry
        return self._store.add_tree(entries)

    def _entry(self, directory: int, name: str, path: str, depth: int) -> Entry | str:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            if depth >= DEPTH_LIMIT:
                return f"more than {DEPTH_LIMIT} directories deep"
            inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=directory)
            try:
                return Entry("40000", self.directory(inner, path + "/", depth + 1))
            finally:
                os.close(inner)
        if kind == stat.S_IFLNK:
            leads_to = os.readlink(os.fsencode(name), dir_fd=directory)
            return Entry("120000", self._store.add(b"blob", leads_to))
        if kind != stat.S_IFREG:
            return "neither a file nor a directory nor a link"
        if status.st_size > FILE_LIMIT:
            return f"larger than {FILE_LIMIT >> 20} MiB"
        object_id = self._file(directory, name, path, status)
        if object_id is None:
            return "changed while it was read"
        self.times[path] = (object_id, status.st_mtime_ns)
        mode: Mode = "100755" if status.st_mode & stat.S_IXUSR else "100644"
        return Entry(mode, object_id)

    def _file(self, directory: int, name: str, path: str, status: os.stat_result) -> str | None:
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            self.stamps[path] = known
            return known[1]
        descriptor = open_regular(name, directory)
        if descriptor is None:
            return None
        try:
            object_id = self._store.add_file(descriptor)
        finally:
            os.close(descriptor)
        # The change time cannot be set by who owns the file; only a clock too coarse could hide a change.
        if object_id is not None and max(stamp[3], stamp[4]) + _TRUSTED_AGE < self._began:
            self.stamps[path] = (stamp, object_id)
        return object_id


@contextlib.contextmanager
def _entered(root: Path, parts: Sequence[str], owner: Owner | None) -> Iterator[int]:
    """The descriptor of a directory below the root; what is missing or in the way is made a directory."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            try:
                inner = os.open(part, _DIRECTORY_FLAGS, dir_fd=descriptor)
            except OSError:
                remove(descriptor, part)
                os.mkdir(part, 0o755, dir_fd=descriptor)
                if owner is not None:
                    os.chown(part, owner.uid, owner.gid, dir_fd=descriptor, follow_symlinks=False)
                inner = os.open(part, _DIRECTORY_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(root: Path, path: str) -> None:
    """Remove one path, and directories above it that are empty then."""
    *parents, name = path.split("/")
    descriptors = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for part in parents:
            descriptors.append(os.open(part, _DIRECTORY_FLAGS, dir_fd=descriptors[-1]))
        remove(descriptors[-1], name)
        for part, directory in zip(reversed(parents), reversed(descriptors[:-1]), strict=True):
            os.rmdir(part, dir_fd=directory)
    except OSError:
        return  # not empty, or gone with what stood above it
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _give(path: str, owner: Owner | None) -> None:
    if owner is not None:
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)


def _load_stamps(path: Path) -> dict[str, tuple[Stamp, str]]:
    try:
        kept = json.loads(path.read_bytes())
        return {name: (tuple(stamp), object_id) for name, (stamp, object_id) in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # only a shortcut: everything is read again


def _save_stamps(path: Path, stamps: Mapping[str, tuple[Stamp, str]]) -> None:
    beside = path.with_name(f".{uuid4().hex}")
    beside.write_text(json.dumps(stamps))
    beside.replace(path)
