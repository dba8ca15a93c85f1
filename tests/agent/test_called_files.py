"""Which files a check calls in its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.called_files import called_files
from endstop.agent.tree import Trees
from tests.agent.projects import project, put

MAKEFILE = (
    "PYTHON ?= python3\ninclude config.inc missing.inc\n-include .env\n.PHONY: test\n\n"
    "all: build\n\ttrue\n\nbuild:\n\tpython setup_it.py\n\n"
    "test: lint\n\t@./scripts/run.sh \\\n\t  --all\n\t$(PYTHON) ci/after.py\n"
    "\t./solve < in.txt | diff - out.txt\n\n"
    "lint:\n\tsh tools/lint.sh\n"
)
FILES = {
    "Makefile": MAKEFILE,
    "config.inc": "X = 1\n",
    ".env": "",
    "setup_it.py": "",
    "scripts/run.sh": "#!/bin/sh\n# sh tools/not.sh\n. ./lib/common\nbash more.sh 'half\n",
    "ci/after.py": "",
    "solve": "#!/usr/bin/env python3\n",
    "tools/lint.sh": "sh tools/lint.sh\n",
    "tools/not.sh": "",
    "lib/common": "OPTIONS=-q\n",
    "package.json": '{"scripts": {"test": "npm run check && make lint", '
    '"check": "node scripts/check.js src.js"}}',
    "scripts/check.js": "",
    "src.js": "",
}


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("pytest", []),
        ("make", [".env", "config.inc", "missing.inc"]),
        (
            "make -s test X=1",
            [
                ".env",
                "ci/after.py",
                "config.inc",
                "lib/common",
                "missing.inc",
                "scripts/run.sh",
                "tools/lint.sh",
            ],
        ),
        ("npm test", [".env", "config.inc", "missing.inc", "scripts/check.js", "tools/lint.sh"]),
        ("cd . && sh scripts/run.sh", ["lib/common"]),
        ("make nothing", [".env", "config.inc", "missing.inc"]),
    ],
)
def test_files_that_are_called(command: str, found: list[str], tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    put(root, dict(FILES))
    trees = Trees(tmp_path / "state", root)
    assert called_files(trees, trees.snapshot(), command) == found


def test_they_are_protected(tmp_path: Path) -> None:
    files = {
        "package.json": '{"scripts": {"test": "node scripts/check.js"}}',
        "scripts/check.js": "if (require('../calc').add(2, 3) !== 5) process.exit(1)\n",
        "calc.js": "exports.add = (a, b) => a - b\n",
    }
    made = project(tmp_path, files, "npm test")
    made.verification.start()
    made.write({"scripts/check.js": "\n", "calc.js": "exports.add = () => 5\n"})
    assert made.protected_changed() == ["scripts/check.js"]


@pytest.mark.parametrize(
    ("files", "command", "found"),
    [
        ({"check.sh": "if [ -f .env ]; then . ./.env; fi\ncp -r . build\n"}, "sh check.sh", [".env"]),
        (
            {"rules": "-include local/*.conf a.d\nall:\n\tsh ci/a.sh\n", "ci/a.sh": ""},
            "make -f rules",
            ["ci/a.sh", "local/*.conf"],
        ),
        ({"web/Makefile": "all:\n\tsh ../ci/a.sh\n", "ci/a.sh": ""}, "make -C web", ["ci/a.sh"]),
        ({"Makefile": "D = etc\ninclude $(D)/a\n", "etc/a": "include etc/b\n"}, "make", ["etc/a", "etc/b"]),
        ({"Makefile": "include $(wildcard etc/*)\n", "etc/a": ""}, "make", ["etc/*", "etc/a"]),
    ],
)
def test_what_would_be_read_if_it_were_there(
    files: dict[str, str], command: str, found: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    put(root, dict(files))
    trees = Trees(tmp_path / "state", root)
    assert called_files(trees, trees.snapshot(), command) == found
