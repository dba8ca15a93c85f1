"""The command line of the strongest sandbox, bubblewrap.

Inside there is a file system of its own: /usr and a few files of /etc read-only, an empty /home and /tmp, the
workspace as /workspace. No network, no environment, no other processes, no user namespaces. Root's commands
run as another user, since the kernel does not limit root's processes; what that user could not reach on the
way (/root is closed) is bound to a place that he can, in a mount namespace that ends with the command.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from endstop.sandbox.settings import CommandLimits, SandboxSettings

INSIDE = "/workspace"
HOME = "/home/sandbox"
PATH = "/usr/local/bin:/usr/bin:/bin"
# Vite cannot read its configuration without the first.
CACHES_OF_PACKAGES = (".vite-temp", ".vite", ".vitest", ".cache")
# Who a command is to itself, whoever it is outside.
INSIDE_UID = 1000
# Root makes its bindings below this directory, each command in a mount namespace of its own.
STAGE = Path("/run/endstop-sandbox")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl/certs",
    "ssl/openssl.cnf",
    "pki/tls/certs",
    "pki/ca-trust",
    "ca-certificates",
    "nsswitch.conf",
    "localtime",
    "timezone",
    "os-release",
    "mime.types",
    "protocols",
    "services",
)
_ETC_FOR_NETWORK = ("resolv.conf", "hosts", "gai.conf")
# The command waits until whoever started it has seen that it would be killed with him: it says that it is
# there with a first byte of output and goes on at a line of input.
_WAIT = 'printf "\\000"; IFS= read -r go || exit 125; exec "$@" </dev/null'
_STAGE_SCRIPT = """
set -e
stage=$1; shift
mount -n -t tmpfs -o mode=0711,size=1m,nr_inodes=1024 tmpfs "$stage"
number=0
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir "$stage/$number"; else : > "$stage/$number"; fi
  mount -n --rbind "$1" "$stage/$number"
  number=$((number + 1)); shift
done
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a command sees of the host. Paths of the host are absolute.

    Attributes:
        workspace: seen as /workspace. directory: where the command starts, relative to it.
        read_only, writable: seen at their own place.
        bind: path inside the workspace, or anywhere inside -> path of the host, read-only.
        read_only_inside: paths inside the workspace.
        also_at: further names of the workspace. What is read-only or writable below one of them is seen in
            the workspace itself.
    """

    workspace: Path
    directory: str = "."
    read_only: Sequence[Path] = ()
    writable: Sequence[Path] = ()
    bind: Mapping[str, Path] = field(default_factory=dict)
    read_only_inside: Sequence[str] = ()
    also_at: Sequence[Path] = ()

    def links(self) -> list[Path]:
        """Of `also_at` those that can be links, since nothing else is at that place."""
        fixed = [Path(path) for path in (INSIDE, HOME, "/tmp", "/etc", "/dev", "/proc")]
        wide = [Path(path) for path in ("/usr", "/etc", "/dev", "/proc", INSIDE)]
        bound = [*self.read_only, *self.writable, *wide]
        free = {
            path
            for path in self.also_at
            if not any(place.is_relative_to(path) for place in fixed)
            and not any(path.is_relative_to(place) for place in bound)
        }
        return sorted(path for path in free if free.isdisjoint(path.parents))

    def place(self, path: Path) -> str:
        """Where a path of the host that is read-only or writable is seen."""
        for link in self.links():
            if path.is_relative_to(link):
                return os.path.normpath(os.path.join(INSIDE, path.relative_to(link)))
        return str(path)

    def inside(self) -> dict[Path, str]:
        """Of what is read-only or writable that which is seen in the workspace, and where there."""
        places = {path: self.place(path) for path in (*self.read_only, *self.writable)}
        return {
            path: place[len(INSIDE) + 1 :] for path, place in places.items() if place.startswith(f"{INSIDE}/")
        }

    def sources(self) -> list[Path]:
        """Every path of the host that is bound."""
        inside = [self.workspace / path for path in self.read_only_inside]
        return [self.workspace, *self.read_only, *self.writable, *self.bind.values(), *inside]


def options(
    layout: Layout,
    settings: SandboxSettings,
    environment: Mapping[str, str],
    *,
    sources: Mapping[Path, Path],
    data: Mapping[str, int],
) -> list[str]:
    """bubblewrap's own options. `sources`: where a path of the host is taken from, when not from itself;
    `data`: path inside -> file descriptor of its content."""
    limits = settings.limits

    def bound(option: str, path: Path, inside: str) -> list[str]:
        return [option, str(sources.get(path, path)), inside]

    args = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    args += [] if settings.network else ["--unshare-net"]
    args += ["--disable-userns", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    args += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        top = Path("/", name)
        if top.is_symlink():
            args += ["--symlink", os.readlink(top), str(top)]
        elif top.is_dir():
            args += ["--ro-bind", str(top), str(top)]
    args += ["--perms", "0755", "--dir", "/etc"]
    for name in (*_ETC, *(_ETC_FOR_NETWORK if settings.network else ())):
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for file, descriptor in data.items():
        args += ["--perms", "0444", "--ro-bind-data", str(descriptor), file]
    # What is not a size here is bounded by half of the memory, so nothing else stays writable.
    args += ["--proc", "/proc"]
    # Of the first process, which ends with whoever started all this: see seccomp.py.
    for memory in ("/proc/1/mem", "/proc/1/task/1/mem"):
        args += ["--ro-bind", "/dev/null", memory]
    args += ["--dev", "/dev", "--size", str(limits.tmp_bytes), "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev", "--size", str(limits.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    args += ["--size", str(limits.home_bytes), "--tmpfs", HOME]
    places = [("--ro-bind", path, layout.place(path)) for path in layout.read_only]
    places += [("--bind", path, layout.place(path)) for path in layout.writable]
    places.append(("--bind", layout.workspace, INSIDE))
    # The workspace before what is seen in it.
    for option, path, place in sorted(places, key=lambda it: it[2].startswith(f"{INSIDE}/")):
        args += bound(option, path, place)
    for inside, path in layout.bind.items():
        args += bound("--ro-bind", path, os.path.join(INSIDE, inside))
        for name in written_within(path):
            place = os.path.join(INSIDE, inside, name)
            args += ["--size", str(limits.tmp_bytes), "--perms", "0755", "--tmpfs", place]
    for inside in layout.read_only_inside:
        args += bound("--ro-bind", layout.workspace / inside, f"{INSIDE}/{inside}")
    for link in layout.links():
        args += ["--symlink", INSIDE, str(link)]
    args += ["--remount-ro", "/", "--chdir", os.path.normpath(f"{INSIDE}/{layout.directory}")]
    for name, value in environment.items():
        args += ["--setenv", name, value]
    return args


def written_within(path: Path) -> list[str]:
    """Directories in one that is bound, in which tools must be able to write: empty for each command."""
    if path.name != "node_modules":
        return []
    return [name for name in CACHES_OF_PACKAGES if (path / name).is_dir() and not (path / name).is_symlink()]


def waiting(argv: Sequence[str], limits: CommandLimits, others: int) -> list[str]:
    """The command under its limits, waiting for the word to go. `others`: processes that count too."""
    cpu = max(1, round(limits.cpu_seconds))
    processes = others + limits.processes
    return [
        *("/bin/sh", "-c", _WAIT, "sh", _tool("prlimit")),
        f"--nproc={processes}:{processes}",
        f"--as={limits.address_bytes}:{limits.address_bytes}",
        f"--fsize={limits.file_bytes}:{limits.file_bytes}",
        f"--nofile={limits.open_files}:{limits.open_files}",
        # Above the soft limit SIGXCPU, which says what happened; above the hard one SIGKILL.
        f"--cpu={cpu}:{cpu + 2}",
        "--core=0:0",
        "--",
        *argv,
    ]


def dropped(argv: Sequence[str], uid: int) -> list[str]:
    """As another user with no way back."""
    rights = ["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    return [_tool("setpriv"), f"--reuid={uid}", f"--regid={uid}", *rights, *argv]


def staged(argv: Sequence[str], sources: Sequence[Path]) -> list[str]:
    """Behind a mount namespace in which source number i is bound to STAGE/i."""
    script = ["/bin/sh", "-c", _STAGE_SCRIPT, "sh", str(STAGE), *map(str, sources), "--", *argv]
    return [_tool("unshare"), "--mount", "--propagation", "private", *script]


def reachable(path: Path, uid: int) -> bool:
    """Whether a user without groups may search every directory on the way to a path."""
    for parent in {*path.parents, *Path(os.path.realpath(path)).parents}:
        state = parent.stat()
        if not state.st_mode & (0o100 if state.st_uid == uid else 0o001):
            return False
    return True


def _tool(name: str) -> str:
    return shutil.which(name) or name
