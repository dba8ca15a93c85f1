"""What definitions cost, by template, as JSON, as an estimate; `endstop agent tools`; own tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from endstop.agent.cost import definition_costs, open_counter
from endstop.agent.tool import Tool, ToolResult, tool
from endstop.agent.tools.own import load_tools
from endstop.protocol.errors import EndstopError
from endstop.testing import cycle_model
from tests.cli.conftest import Run, endstop, home  # noqa: F401 (fixtures)

TEMPLATE = (
    "{% if tools %}TOOLS:{% for tool in tools %}{{ tool | tojson }};{% endfor %}END{% endif %}"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


@tool
def small() -> str:
    """Small."""
    return ""


@tool
def larger(path: str, count: int = 3) -> str:
    """Larger, with a few words of description."""
    return ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token for each byte: costs are lengths."""
    return cycle_model(tmp_path_factory.mktemp("model") / "cycle").path


def json_of(made: Tool) -> str:
    return json.dumps(made.definition, ensure_ascii=False)


def test_by_the_models_template(model: Path) -> None:
    costs = definition_costs([small, larger], open_counter(str(model), template=TEMPLATE))
    assert costs.basis == "template"
    assert [(row.name, row.tokens) for row in costs.rows] == [
        ("small", len(json_of(small)) + 1),
        ("larger", len(json_of(larger)) + 1),
    ]
    assert costs.around == len("TOOLS:END")
    assert costs.total == len(json_of(small)) + len(json_of(larger)) + 2 + 9
    (alone,) = definition_costs([small], open_counter(str(model), template=TEMPLATE)).rows
    assert alone.tokens == len(json_of(small)) + 1
    assert costs.warning == (
        f"2 tool definitions cost {costs.total} tokens in every prompt: "
        f"larger {costs.rows[1].tokens}, small {costs.rows[0].tokens}."
    )


def test_as_json_where_the_template_writes_no_tools(model: Path) -> None:
    costs = definition_costs([small, larger], open_counter(str(model)))
    assert (costs.basis, costs.why) == ("json", "the model's chat template writes no tools")
    assert [row.tokens for row in costs.rows] == [len(json_of(small)) + 1, len(json_of(larger)) + 1]
    refusing = TEMPLATE + "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    assert "no tools here" in open_counter(str(model), template=refusing).why


def test_an_estimate_says_so() -> None:
    costs = definition_costs([small, larger], open_counter(None))
    assert costs.basis == "estimate"
    assert costs.rows[0].tokens == -(-(len(json_of(small)) + 1) // 4)
    assert "cost about" in costs.warning
    assert open_counter("http://localhost:1/v1").basis == "estimate"
    assert definition_costs([], open_counter(None)).total == 0


def test_a_users_own_tools(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from typing import Literal\n"
        "from endstop.agent.tool import tool\n\n"
        "Unit = Literal['m', 'km']\n\n"
        "@tool\ndef far(unit: Unit) -> str:\n    'How far.'\n    return unit\n"
    )
    (far,) = load_tools(path)
    assert far.parameters["properties"]["unit"] == {"type": "string", "enum": ["m", "km"]}
    assert far.run(unit="km") == ToolResult("km")
    assert [made.name for made in load_tools("tests.agent.test_tool_cost")] == ["small", "larger"]
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    for place, words in [
        (tmp_path / "none.py", "holds no tool"),
        (tmp_path / "broken.py", "cannot be imported: ModuleNotFoundError"),
        (tmp_path / "absent.py", "is no Python file"),
        ("no.such.module", "no.such.module cannot be imported"),
    ]:
        with pytest.raises(EndstopError, match=words):
            load_tools(place)


def test_the_verb(endstop: Run, home: Path, model: Path) -> None:  # noqa: F811
    listed = endstop("agent", "tools")
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names[:2] == ["read_file", "list_files"]
    assert names[-1] == "oracle"
    shown = endstop("agent", "tools", "--cost")
    assert "an ESTIMATE, by length (no model is named)" in shown.stderr
    (home / "t.jinja").write_text(TEMPLATE)
    arguments = ["agent", "tools", "--cost", "--json", "--model", str(model), "--template", "t.jinja"]
    result: dict[str, Any] = json.loads(endstop(*arguments).stdout)
    assert result["cost"]["basis"] == "template"
    tokens = [entry["tokens"] for entry in result["tools"]]
    assert sum(tokens) + result["cost"]["around"] == result["cost"]["total"]
    assert tokens[0] == len(json.dumps(result["tools"][0]["definition"], ensure_ascii=False)) + 1


@pytest.mark.slow
def test_the_verb_with_servers_and_own_tools(endstop: Run, home: Path) -> None:  # noqa: F811
    (home / "demo.py").write_text(
        "from mcp.server import MCPServer\n"
        "server = MCPServer('demo')\n"
        "@server.tool()\ndef bash(command: str) -> str:\n    'A\\nshell \\x1b[31mred.'\n    return ''\n"
        "server.run()\n"
    )
    (home / "own.py").write_text(
        "from endstop.agent.tool import tool\n@tool\ndef mine() -> str:\n    'My own.'\n    return ''\n"
    )
    command = f"{sys.executable} demo.py"
    shown = endstop("agent", "tools", "--mcp", command, "--tools", "own.py")
    assert shown.returncode == 0, shown.stderr
    lines = [line.split(maxsplit=2) for line in shown.stdout.splitlines()]
    assert ["mine", "own.py", "My own."] in lines
    assert lines[-1][0] == "demo_bash"
    assert "1 tool definition cost about " in shown.stderr
    assert "\x1b" not in shown.stdout
    (home / "servers.json").write_text(json.dumps({"mcpServers": {"x": {"command": "/no-such-program"}}}))
    failed = endstop("agent", "tools", "--mcp", "servers.json")
    assert failed.returncode == 1
    assert failed.stderr.startswith("endstop: MCP server x cannot be opened: ")
    assert "Traceback" not in failed.stderr


def test_a_misspelled_verb_starts_no_run(endstop: Run) -> None:  # noqa: F811
    failed = endstop("agent", "tolls")
    assert failed.returncode == 2
    assert "did you mean tools?" in failed.stderr
