"""The loop: ask the model, run its calls, let the gate decide about every end, save. Nothing else ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from endstop.agent.context import ContextBudget, shorten
from endstop.agent.decisions import Decision, End, NoticeCode
from endstop.agent.gate import Gate
from endstop.agent.models import AgentModel, ModelFailed, WindowFull
from endstop.agent.stuck import Circles
from endstop.agent.task import Bounds
from endstop.agent.tool import CheckedCall, Tool, ToolResult, check_call
from endstop.agent.trajectory import Message, Trajectory, decision_meta
from endstop.outcomes import AgentOutcome
from endstop.protocol.toolcalls import ToolCall

ANSWERED = "The user says: "
_NOTED = "Noted. This is no end: the task is open until submit is accepted. Go on."


class Agent:
    """One run, from where its trajectory stands to an end.

    Args:
        tree: takes a snapshot of the files and gives its id.
        person: answers a question, or gives None; None: there is nobody.
    """

    def __init__(
        self,
        model: AgentModel,
        tools: Sequence[Tool],
        gate: Gate,
        trajectory: Trajectory,
        budget: ContextBudget,
        bounds: Bounds,
        *,
        tree: Callable[[], str],
        person: Callable[[str], str | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.tools, self.gate = model, tools, gate
        self.trajectory, self.budget, self.bounds = trajectory, budget, bounds
        self.tree, self.person, self.clock = tree, person, clock
        self.definitions = [tool.definition for tool in tools]
        self.circles = Circles.of(trajectory.messages, bounds.repeats)
        self._since = clock() - trajectory.seconds

    def run(self) -> End:
        """Step until something ends the run. Ctrl-C and a model that fails are ends too, and resumable."""
        try:
            end = self._unanswered()
            while end is None:
                end = self._limit() or self._step()
        except KeyboardInterrupt:
            end = self.gate.finish("interrupted", "The run was interrupted; it can be resumed.")
        except ModelFailed as error:
            end = self.gate.finish("error", str(error))
        self.save()
        return end

    def save(self) -> None:
        """Everything that a resumed run needs, in one file."""
        self.trajectory.seconds = self.seconds
        self.trajectory.gate = self.gate.state.to_dict()
        self.trajectory.save()

    @property
    def seconds(self) -> float:
        """Wall clock of the run, earlier sittings included."""
        return self.clock() - self._since

    def _limit(self) -> End | None:
        bounds = self.bounds
        limits: tuple[tuple[AgentOutcome, float, float | None, str], ...] = (
            ("limit:steps", self.trajectory.steps, bounds.steps, "steps"),
            ("limit:time", self.seconds, bounds.seconds, "seconds"),
            ("limit:cost", self.trajectory.cost, bounds.cost, "of cost"),
        )
        for outcome, used, limit, unit in limits:
            if limit is not None and used >= limit:
                named = unit.removesuffix("s") if limit == 1 else unit
                return self.gate.finish(outcome, f"The limit of {limit:g} {named} is reached.")
        return None

    def _step(self) -> End | None:
        room = self.budget.make_room(self.trajectory, self.gate.state_block)
        if room is None:
            return self.gate.finish("limit:context", "The window is full; nothing more can be left out.")
        prompt = self.trajectory.prompt()
        left = None if self.bounds.seconds is None else max(0.01, self.bounds.seconds - self.seconds)
        self.trajectory.watch("asking", None)
        try:
            turn = self.model.ask(
                prompt,
                self.definitions,
                max_tokens=room,
                max_time=left,
                step=self.trajectory.steps,
                clock=self.clock,
            )
        except WindowFull as full:
            # The server has said what nobody had named before. At the second time its word is no help, and
            # this prompt is more than the window holds.
            said = None if full.window == self.budget.window else full.window
            self.budget.window = said or self.budget.count(prompt, self.definitions)
            return None
        message = self.trajectory.add_turn(turn)
        self.trajectory.spend(turn.cost)
        self.save()
        over = self._limit() if turn.output.stop_kind == "deadline" else None
        return over or self._respond(message)

    def _unanswered(self) -> End | None:
        """A run that was killed may have saved an answer of the model and not what became of it."""
        messages = self.trajectory.messages
        return self._respond(messages[-1]) if messages and messages[-1]["role"] == "assistant" else None

    def _respond(self, turn: Message) -> End | None:
        """What becomes of an answer of the model."""
        if "cut" in turn["meta"]:
            return self._malformed("TRUNCATED", turn["meta"]["cut"])
        if "bad" in turn["meta"]:
            return self._malformed("BAD_CALL", turn["meta"]["bad"])
        calls = self.trajectory.open_calls()
        if not calls:
            self.gate.good_turn()
            return self._tell(None, self.gate.text_only())
        return self._run_calls(calls)

    def _malformed(self, code: NoticeCode, why: str) -> End | None:
        """No call of this turn runs; each gets an error for its result."""
        decision = self.gate.format_error(code, why)
        for call in self.trajectory.open_calls():
            self._tell(call, decision)
        if not self.trajectory.turns[-1].get("tool_calls"):
            self._tell(None, decision)
        return decision if isinstance(decision, End) else None

    def _run_calls(self, calls: Sequence[Mapping[str, Any]]) -> End | None:
        bad: list[str] = []
        end: End | None = None
        for call in calls:
            if end is not None:
                break
            function = call["function"]
            checked = check_call(self.tools, ToolCall(function["name"], function["arguments"], ""))
            if isinstance(checked, ToolResult):
                bad.append(checked.text)
                end = self._answer(call, checked)
            elif not checked.tool.ends:
                end = self._run(call, checked)
            elif len(calls) > 1:
                self._tell(call, self.gate.not_alone(checked.tool.name))
            else:
                self.gate.good_turn()
                return self._decide(call, checked)
        if len(bad) < len(calls):
            self.gate.good_turn()
        elif end is None:
            decision = self.gate.format_error("BAD_CALL", bad[0])
            end = decision if isinstance(decision, End) else None
        self.save()
        return end

    def _run(self, call: Mapping[str, Any], checked: CheckedCall) -> End | None:
        self.trajectory.watch("running", call)
        started = self.clock()
        result = checked.run()
        return self._answer(call, result, seconds=round(self.clock() - started, 3))

    def _answer(self, call: Mapping[str, Any], result: ToolResult, **meta: Any) -> End | None:
        """Record a result, and see whether the run goes in circles."""
        tree = self.tree()
        if result.code is not None:
            meta["code"] = result.code
        if result.details:
            meta["details"] = dict(result.details)
        text = shorten(result.text, self.budget.output_bytes)
        message = self.trajectory.answer(call, text, result.ok, tree=tree, **meta)
        self.save()
        if self.circles.add(call, message["content"], tree):
            name, repeats = call["function"]["name"], self.bounds.repeats
            return self.gate.finish("stuck", f"{name} was called {repeats} times with the same result.")
        return None

    def _decide(self, call: Mapping[str, Any], checked: CheckedCall) -> End | None:
        """The tools that ask for an end, or yield: what the gate or the person says is the call's result."""
        name, arguments = checked.tool.name, dict(checked.arguments)
        self.trajectory.watch("deciding", call)
        if name == "submit":
            return self._tell(call, self.gate.submit(**arguments))
        if name == "give_up":
            return self._tell(call, self.gate.give_up(**arguments))
        said = self.person(arguments["question" if name == "ask_user" else "note"]) if self.person else None
        if said:
            return self._answer(call, ToolResult(ANSWERED + said))
        if name == "checkpoint":
            return self._answer(call, ToolResult(_NOTED))
        decision = self.gate.ask_user(arguments["question"])
        if isinstance(decision, End) and self.gate.interactive:
            return decision  # the call stays open until a resumed run brings the answer
        return self._tell(call, decision)

    def _tell(self, call: Mapping[str, Any] | None, decision: Decision) -> End | None:
        """Record a decision as the result of a call, or as the user's turn where there was none."""
        meta, end = decision_meta(decision), decision if isinstance(decision, End) else None
        if call is not None:
            tree = self.tree()
            self.trajectory.answer(call, decision.message, end is not None, tree=tree, decision=meta)
        else:
            self.trajectory.say("user", decision.message, "notice", decision=meta)
        self.save()
        return end
