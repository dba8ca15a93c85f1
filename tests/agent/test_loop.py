"""The loop by itself: what runs, what does not, how it ends. The project has no check here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import pytest

from endstop.agent.context import ContextBudget
from endstop.agent.gate import Gate, GateState
from endstop.agent.loop import Agent
from endstop.agent.models import AgentModel
from endstop.agent.settings import ContextSettings, Price
from endstop.agent.task import Bounds, ChecklistItem, Task
from endstop.agent.tool import Tool, ToolResult, tool
from endstop.agent.tools.ending import ending_tools
from endstop.agent.trajectory import Trajectory
from endstop.agent.tree import Trees
from endstop.protocol.errors import EndstopError
from endstop.protocol.toolcalls import ToolCall
from endstop.testing import Reply, ScriptedChat


def call(name: str, **arguments: object) -> ToolCall:
    text = json.dumps(arguments)
    return ToolCall(name, text, text)


def turn(*calls: ToolCall, text: str = "", **more) -> Reply:
    return Reply(text, calls, **more)


SUBMIT = turn(call("submit", summary="done"))


class Run:
    """A workspace, a loop over it, and what became of it."""

    def __init__(self, place: Path, answers, *, interactive=False, person=None, window=None, **bounds):
        self.workspace, self.state = place / "workspace", place / "state"
        self.workspace.mkdir(exist_ok=True)
        self.state.mkdir(exist_ok=True)
        self.ran: list[str] = []
        self.chat = ScriptedChat(answers)
        self.interactive, self.person, self.window = interactive, person, window
        self.bounds = Bounds(**bounds)
        self.trees = Trees(self.state, self.workspace)
        path = self.state / "trajectory.json"
        if path.exists():
            self.trajectory = Trajectory.load(path)
        else:
            self.trajectory = Trajectory(path, "run", baseline=self.trees.snapshot())
            self.trajectory.gate = GateState().to_dict()
            self.trajectory.say("user", "Fix it.", "task")

    def tools(self) -> list[Tool]:
        ran, workspace = self.ran, self.workspace

        @tool
        def write(path: Annotated[str, "where"], text: str = "") -> str:
            """Write a file."""
            ran.append(f"write {path}")
            (workspace / path).write_text(text)
            return "written"

        @tool
        def look(at: str = "") -> str:
            """Say the same every time."""
            ran.append(f"look {at}")
            return "nothing"

        @tool
        def poll() -> str:
            """Say something else every time."""
            ran.append("poll")
            return f"{len(ran)} done"

        @tool
        def fail() -> ToolResult:
            """Fail."""
            raise EndstopError("it does not work")

        @tool
        def interrupt() -> str:
            """Somebody presses Ctrl-C."""
            raise KeyboardInterrupt

        return [write, look, poll, fail, interrupt, *ending_tools()]

    def agent(self, **model) -> Agent:
        task = Task(task="Fix it.", bounds=self.bounds, checklist=())
        state = GateState.from_dict(self.trajectory.gate)
        gate = Gate(task, self.trees, None, state, self.trajectory.baseline, self.interactive)
        tools = self.tools()
        definitions = [one.definition for one in tools]
        given = AgentModel(self.chat, "scripted", "scripted", window=self.window, **model)
        budget = ContextBudget(self.window, given.count, 100, ContextSettings(answer=20), definitions)
        return Agent(
            given,
            tools,
            gate,
            self.trajectory,
            budget,
            self.bounds,
            tree=self.trees.snapshot,
            person=self.person,
        )

    def run(self, **model):
        self.end = self.agent(**model).run()
        return self.end.outcome

    @property
    def codes(self) -> list[str]:
        return [code for _, code in self.trajectory.decisions()]

    @property
    def results(self) -> list[str]:
        return [m["content"] for m in self.trajectory.messages if m["role"] == "tool"]


def test_a_run_that_works_and_submits(tmp_path):
    run = Run(tmp_path, [turn(call("write", path="a", text="1"), text="I write."), SUBMIT])
    assert run.run() == "unverified"  # there is no check, and no run ends as verified without one
    assert run.ran == ["write a"]
    assert (tmp_path / "workspace" / "a").read_text() == "1"
    assert run.codes == ["unverified"]
    # What the model was asked is what the record holds.
    saved = Trajectory.load(run.trajectory.path)
    assert list(run.chat.calls[1].messages) == saved.prompt()[:3]
    trees = [message["meta"].get("tree") for message in saved.messages if message["role"] == "tool"]
    assert len(set(trees)) == 1
    assert trees[0] != saved.baseline


@pytest.mark.parametrize("kind", ["max_tokens", "context", "repetition", "cancelled"])
def test_a_cut_turn_runs_nothing(tmp_path, kind):
    cut = turn(call("write", path="a"), call("write", path="b"), stop_kind=kind, open_call='{"pa')
    run = Run(tmp_path, [cut, SUBMIT])
    assert run.run() == "unverified"
    assert run.ran == []
    assert list((tmp_path / "workspace").iterdir()) == []
    assert run.codes[:2] == ["TRUNCATED", "TRUNCATED"]
    assert all(result.startswith("TRUNCATED") for result in run.results[:2])


def test_a_cut_text_is_truncated_and_no_claim(tmp_path):
    run = Run(tmp_path, [turn(text="I have fixed the", stop_kind="max_tokens"), SUBMIT])
    run.run()
    assert run.codes == ["TRUNCATED", "unverified"]
    assert run.trajectory.messages[2]["role"] == "user"


def test_cut_turns_in_a_row_end_the_run(tmp_path):
    cut = turn(call("write", path="a"), stop_kind="max_tokens")
    run = Run(tmp_path, [cut, cut, turn(call("look")), cut, cut, cut])
    assert run.run() == "repeated_format_error"
    assert run.trajectory.steps == 6  # the good turn began the row anew


@pytest.mark.parametrize("known", [True, False])
def test_a_full_answer_is_a_cut_only_where_the_backend_may_hide_cuts(tmp_path, known):
    full = turn(call("write", path="a"), tokens=100)
    run = Run(tmp_path, [full, SUBMIT])
    run.run(reports_cuts=known)
    assert run.ran == (["write a"] if known else [])


def test_a_call_that_cannot_be_read_stops_the_whole_turn(tmp_path):
    run = Run(tmp_path, [turn(call("write", path="a"), open_call='{"path": "b'), SUBMIT])
    assert run.run() == "unverified"
    assert run.ran == []
    assert run.codes == ["BAD_CALL", "unverified"]


def test_a_wrong_call_is_answered_and_its_neighbours_run(tmp_path):
    run = Run(tmp_path, [turn(call("write", wrong=1), call("wrote", path="a"), call("look", at="a")), SUBMIT])
    assert run.run() == "unverified"
    assert run.ran == ["look a"]
    assert [result.partition(":")[0] for result in run.results[:2]] == ["BAD_CALL", "BAD_CALL"]
    assert "look" in run.results[1]  # it names the tools that there are


def test_turns_of_wrong_calls_only_are_format_errors(tmp_path):
    bad = [turn(call("nothing", n=n)) for n in range(3)]
    run = Run(tmp_path, bad)
    assert run.run() == "repeated_format_error"


def test_a_tool_that_fails_is_a_result(tmp_path):
    run = Run(tmp_path, [turn(call("fail")), SUBMIT])
    assert run.run() == "unverified"
    assert "it does not work" in run.results[0]
    assert run.trajectory.messages[2]["meta"]["ok"] is False


def test_text_alone_is_reminded_and_then_ends(tmp_path):
    run = Run(tmp_path, ["Done.", "Done!", "Done, really."])
    assert run.run() == "stopped_without_submit"
    assert run.codes == ["NO_SUBMIT", "NO_SUBMIT", "stopped_without_submit"]


def test_an_end_beside_other_calls_is_not_looked_at(tmp_path):
    both = turn(call("write", path="a"), call("submit", summary="x"))
    run = Run(tmp_path, [both, SUBMIT])
    assert run.run() == "unverified"
    assert run.ran == ["write a"]
    assert run.codes == ["SUBMIT_NOT_ALONE", "unverified"]


def test_two_submits_are_none(tmp_path):
    two = turn(call("submit", summary="x"), call("submit", summary="y"))
    run = Run(tmp_path, [two, SUBMIT])
    assert run.run() == "unverified"
    assert run.codes == ["SUBMIT_NOT_ALONE", "SUBMIT_NOT_ALONE", "unverified"]


def test_the_same_call_with_the_same_result_is_stuck(tmp_path):
    run = Run(tmp_path, [turn(call("look", at="a"))] * 9)
    assert run.run() == "stuck"
    assert run.trajectory.steps == 4


def test_going_round_in_circles_is_stuck(tmp_path):
    answers = [turn(call("look", at="a")), turn(call("look", at="b"))] * 9
    run = Run(tmp_path, answers)
    assert run.run() == "stuck"
    assert run.trajectory.steps == 7


def test_polling_and_working_are_not_stuck(tmp_path):
    answers = [turn(call("poll"))] * 6
    answers += [turn(call("look"), call("write", path="a", text=str(n))) for n in range(6)]
    run = Run(tmp_path, [*answers, SUBMIT])
    assert run.run() == "unverified"


def test_arguments_in_another_order_are_the_same_call(tmp_path):
    spelled = ['{"path": "a", "text": "x"}', '{"text":"x","path":"a"}']
    answers = [turn(ToolCall("write", spelled[n % 2], "")) for n in range(8)]
    run = Run(tmp_path, answers)
    assert run.run() == "stuck"
    assert run.trajectory.steps == 4


def test_steps_are_limited(tmp_path):
    run = Run(tmp_path, [turn(call("poll"))] * 9, steps=3)
    assert run.run() == "limit:steps"
    assert len(run.chat.calls) == 3


def test_a_submit_in_the_last_step_counts(tmp_path):
    run = Run(tmp_path, [turn(call("poll")), SUBMIT], steps=2)
    assert run.run() == "unverified"


def test_cost_is_limited(tmp_path):
    run = Run(tmp_path, [turn(call("poll"), tokens=1000)] * 9, cost=0.02)
    assert run.run(price=Price(output=10)) == "limit:cost"
    assert run.trajectory.steps == 2
    assert run.trajectory.cost == pytest.approx(0.02)


def test_time_is_limited_and_counts_over_resumptions(tmp_path):
    run = Run(tmp_path, [turn(call("poll"))] * 9, seconds=100)
    run.trajectory.seconds = 99.9999
    now = [0.0]
    agent = run.agent()
    agent.clock = lambda: now[0]
    agent._since = -99.5
    run.chat.answers = [lambda messages: now.__setitem__(0, now[0] + 0.3) or turn(call("poll"))] * 9
    assert agent.run().outcome == "limit:time"
    assert run.trajectory.steps == 2
    assert run.trajectory.seconds >= 100


def test_the_deadline_of_an_answer_is_the_limit_of_time(tmp_path):
    late = turn(call("write", path="a"), stop_kind="deadline")
    run = Run(tmp_path, [late], seconds=0.001)
    run.chat.answers = [lambda messages: time.sleep(0.01) or late]
    agent = run.agent()
    assert agent._step().outcome == "limit:time"
    assert run.ran == []


def test_a_full_window_ends_the_run(tmp_path):
    run = Run(tmp_path, [turn(call("poll"))] * 9, window=300)
    assert run.run() == "limit:context"


def test_a_model_that_fails_once_is_asked_again_and_twice_is_an_error(tmp_path):
    broken = turn(call("write", path="a"), stop_kind="error")
    run = Run(tmp_path, [broken, SUBMIT])
    assert run.run() == "unverified"
    assert run.ran == []
    assert run.trajectory.steps == 1

    def unreachable(messages):
        raise EndstopError("the server cannot be reached")

    other = Run(_new(tmp_path), [unreachable, broken])
    assert other.run() == "error"
    assert "failed twice" in other.end.message


def test_headless_questions_are_answered_by_the_harness(tmp_path):
    ask = turn(call("ask_user", question="ints only?"))
    run = Run(tmp_path, [ask, turn(call("submit", summary="x", assumptions=["numbers"]))])
    assert run.run() == "unverified"
    assert run.codes == ["NO_USER_AVAILABLE", "unverified"]
    assert run.trajectory.gate["assumptions"] == ["numbers"]
    many = Run(_new(tmp_path), [ask, ask, ask])
    assert many.run() == "needs_user"
    assert many.codes == ["NO_USER_AVAILABLE", "NO_USER_AVAILABLE", "needs_user"]


def test_a_person_answers(tmp_path):
    asked = []
    ask = turn(call("ask_user", question="ints only?"))
    run = Run(tmp_path, [ask, SUBMIT], interactive=True, person=lambda text: asked.append(text) or "yes")
    assert run.run() == "unverified"
    assert asked == ["ints only?"]
    assert run.results[0] == "The user says: yes"


def test_without_an_answer_the_run_waits_with_its_call_open(tmp_path):
    ask = turn(call("ask_user", question="ints only?"))
    run = Run(tmp_path, [ask, SUBMIT], interactive=True, person=lambda text: None)
    assert run.run() == "needs_user"
    assert [open_call["function"]["name"] for open_call in run.trajectory.open_calls()] == ["ask_user"]


def test_a_checkpoint_is_no_end(tmp_path):
    run = Run(tmp_path, [turn(call("checkpoint", note="half")), SUBMIT])
    assert run.run() == "unverified"
    assert "no end" in run.results[0]


def test_an_interrupt_is_saved_and_leaves_the_call_open(tmp_path):
    run = Run(tmp_path, [turn(call("write", path="a"), call("interrupt"), call("look"))])
    assert run.run() == "interrupted"
    saved = Trajectory.load(run.trajectory.path)
    assert [one["function"]["name"] for one in saved.open_calls()] == ["interrupt", "look"]
    assert saved.gate["outcome"] == "interrupted"


@pytest.mark.parametrize("reply", ["I am done.", turn(call("write", path="a"), stop_kind="max_tokens")])
def test_an_answer_that_was_saved_and_not_judged_is_judged_later(tmp_path, reply):
    run = Run(tmp_path, [reply])
    model = AgentModel(run.chat, "scripted", "scripted")
    answer = model.ask(run.trajectory.prompt(), [], max_tokens=9, max_time=None, clock=time.monotonic)
    run.trajectory.add_turn(answer)
    run.trajectory.save()  # and here it was killed
    later = Run(tmp_path, [SUBMIT])
    assert later.run() == "unverified"
    assert later.ran == []
    assert later.codes[0] == ("NO_SUBMIT" if isinstance(reply, str) else "TRUNCATED")


def test_checklist_items_are_asked_for(tmp_path):
    run = Run(tmp_path, [SUBMIT, turn(call("submit", summary="x", evidence={"docs": "README.md"}))])
    agent = run.agent()
    agent.gate.task = agent.gate.task.model_copy(update={"checklist": (ChecklistItem(id="docs"),)})
    agent.gate.checklist = type(agent.gate.checklist)(agent.gate.task.checklist)
    assert agent.run().outcome == "unverified"
    assert run.codes == ["CHECKLIST_INCOMPLETE", "unverified"]


def _new(place: Path) -> Path:
    made = place / "another"
    made.mkdir()
    return made


def test_the_class_is_readable():
    import inspect

    assert len(inspect.getsource(Agent).splitlines()) < 200
