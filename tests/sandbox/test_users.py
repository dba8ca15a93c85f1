"""The escapes again as an ordinary user, where the tests run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from endstop.sandbox.arguments import reachable

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs root on Linux"
)
USER = 61501
ROOT = Path(__file__).parents[2]
# In a mount namespace of its own everything above the interpreter can be searched by everyone.
OPEN = """
set -e
for path in "$@"; do
  shift
  [ "$path" != -- ] || break
  top=/$(echo "$path" | cut -d/ -f2)
  mount -n --rbind "$path" /mnt
  mount -n -t tmpfs -o mode=0755 tmpfs "$top"
  mkdir -p "$path"
  mount -n --move /mnt "$path"
done
exec "$@"
"""


@pytest.mark.slow
def test_the_same_as_an_ordinary_user(tmp_path: Path) -> None:
    for tool in ("setpriv", "unshare", "mount", "bwrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    places = [Path(os.path.realpath(path)) for path in (sys.prefix, sys.base_prefix, ROOT)]
    hidden = [str(place) for place in places if not reachable(place, USER)]
    # Not below tmp_path, which is closed to others.
    base = Path("/tmp", f"endstop-user-{os.getpid()}")
    base.mkdir(mode=0o700)
    os.chown(base, USER, USER)
    try:
        ended = subprocess.run(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", OPEN, "sh", *hidden, "--"),
                *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
                *("--inh-caps=-all", "--bounding-set=-all"),
                *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"),
                *(f"--basetemp={base}/pytest", "--rootdir", str(ROOT)),
                *(str(ROOT / "tests" / "sandbox" / name) for name in ("test_escape.py", "test_command.py")),
            ],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "HOME": str(base), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=550,
        )
    finally:
        subprocess.run(["rm", "-rf", str(base)], check=True)
    last = ended.stdout.rstrip().rpartition("\n")[2]
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "skipped" not in last, ended.stdout[-4000:]
    assert int(last.split(" passed")[0].split()[-1]) > 40
