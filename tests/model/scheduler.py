"""Actors that run real code, each in its own thread, one at a time: each effect on a port returns control.

A schedule is a list of deviations from the plain one, in which each actor runs to its end before the next one starts:
`(step, label)` pairs. A label is another actor, another answer, a crash, or an event of the world. The same deviations
give the same run. A crashed actor's thread unwinds without any effect: cleanup code changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

Deviation = tuple[int, str]


class Killed(BaseException):
    """The process was killed: nothing runs after it, not even cleanup code."""


_ACTORS: WeakKeyDictionary[threading.Thread, Actor] = WeakKeyDictionary()


def get_current_actor() -> Actor | None:
    """Return the actor of the calling thread; None outside of actors."""
    return _ACTORS.get(threading.current_thread())


@dataclass
class Point:
    """The next effect of an actor. `answers` are the possible answers other than the plain one."""

    label: str
    ready: Callable[[], bool]
    answers: tuple[str, ...]


class Actor:
    """One run, whose thread waits for its turn."""

    def __init__(self, name: str, program: Callable[[], object]) -> None:
        self.name, self._program = name, program
        self.at: Point | None = Point("begins", lambda: True, ())
        self.answer = ""
        self.killed = False
        self.result: object = None
        self.error: BaseException | None = None
        self.history = hash(name)
        """Hash of all its answers: two actors with the same name and history are in the same state."""
        self.changed = True
        """True if it had an effect since its last chance to crash."""
        self._turn = threading.Lock()
        self._turn.acquire()
        self.writes = 0
        """Number of write ids that it drew."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        _ACTORS[self.thread] = self
        self._back = threading.Lock()
        self._back.acquire()
        self.thread.start()

    @property
    def ended(self) -> bool:
        return self.at is None

    def resume(self, answer: str = "") -> None:
        """Run it up to its next effect, or its end."""
        self.answer = answer
        self._turn.release()
        self._back.acquire()

    def wait(self, point: Point) -> str:
        """Stop before an effect; called in the actor's thread. Return its answer. Raises Killed."""
        self.check_alive()
        self.at = point
        self._back.release()
        self._turn.acquire()
        self.check_alive()
        return self.answer

    def check_alive(self) -> None:
        if self.killed:
            raise Killed

    def kill(self) -> None:
        self.killed = True
        if not self.ended:
            self.resume()
        self.thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self.check_alive()
            self.result = self._program()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - reported with the trace
            self.error = error
        finally:
            self.at = None
            self._back.release()


class Stage:
    """Passes control between ports and scheduler. Without actors every effect happens at once."""

    def __init__(self) -> None:
        self.running: Actor | None = None

    def point(self, label: str, ready: Callable[[], bool] = lambda: True, answers: Sequence[str] = ()) -> str:
        """Stop before an effect. Return the answer that the port must give; empty: the plain one. Raises Killed."""
        actor = self.running
        return actor.wait(Point(label, ready, tuple(answers))) if actor else ""

    def record(self, answer: object) -> None:
        """Record an answer that the running actor got."""
        if (actor := self.running) is not None:
            actor.check_alive()
            actor.history = hash((actor.history, answer if isinstance(answer, bytes | str | int) else repr(answer)))


@dataclass
class Event:
    """An event of the world, limited by a budget."""

    label: str
    budget: str
    act: Callable[[], None]


@dataclass
class Outcome:
    """The outcome of one schedule. `choices` has the possible labels of each step."""

    trace: list[str] = field(default_factory=list)
    choices: list[tuple[str, ...]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    broken: str = ""
    converged: bool = False
    """True if it reached a state that was explored before."""


class Schedule:
    """One run of actors. `events` lists the world's possible events, `fingerprint` hashes the world's state, `broken`
    returns a violated invariant, `release` ends waits that only time ends."""

    def __init__(
        self,
        stage: Stage,
        programs: Mapping[str, Callable[[], object]],
        events: Callable[[], Iterable[Event]],
        budgets: Mapping[str, int],
        fingerprint: Callable[[], int],
        broken: Callable[[], str],
        release: Callable[[], bool],
    ) -> None:
        self.stage, self.events, self.remaining = stage, events, dict(budgets)
        self.fingerprint, self.broken, self.release = fingerprint, broken, release
        self.actors = {name: Actor(name, program) for name, program in programs.items()}
        self.current: Actor | None = None
        self.outcome = Outcome()

    def get_actor(self, name: str) -> Actor | None:
        return self.actors.get(name)

    def run(
        self,
        deviations: Iterable[Deviation],
        is_known: Callable[[int, int], bool] = lambda state, step: False,
        choose: Callable[[int, Sequence[str]], str] | None = None,
        max_steps: int = 3000,
    ) -> Outcome:
        """Run the schedule. It ends early if `is_known(state, step)`; `choose` selects labels instead of deviations."""
        planned = dict(deviations)
        outcome = self.outcome
        try:
            for step in range(max_steps):
                if outcome.broken or not (labels := self._list_labels()):
                    return outcome
                last = not any(at >= step for at in planned)
                if last and choose is None:
                    state = self._state()
                    if is_known(state, step):
                        outcome.converged = True
                        return outcome
                    outcome.states.append(state)
                outcome.choices.append(labels)
                wanted = choose(step, labels) if choose else planned.pop(step, labels[0])
                self._do(wanted if wanted in labels else labels[0])
                outcome.broken = self.broken()
            outcome.broken = outcome.broken or f"no end after {max_steps} steps"
            return outcome
        finally:
            self.stage.running = None
            for actor in self.actors.values():
                actor.kill()

    def _list_labels(self) -> tuple[str, ...]:
        """Return the possible labels of this step, the plain one first; none after the end of all actors."""
        ready = self._list_ready()
        if not ready and any(not a.ended for a in self.actors.values()):
            if not self.release():
                self.outcome.broken = "nobody can go on: " + ", ".join(self.list_waiting())
                return ()
            self.outcome.trace.append("-- time passes: what waits only for that goes on")
            ready = self._list_ready()
        if not ready:
            return ()
        first = self.current if self.current in ready else ready[0]
        assert first is not None
        assert first.at is not None
        out = [first.name]
        out += [f"{first.name}: {answer}" for answer in first.at.answers if self._can_afford(answer)]
        out += [a.name for a in ready if a is not first]
        if first.changed and self._can_afford("crash") and first.at.label != "begins":
            out.append(f"{first.name} crashes")
        return (*out, *(e.label for e in self.events() if self.remaining.get(e.budget, 0) > 0))

    def list_waiting(self) -> list[str]:
        return [f"{a.name} before {a.at.label}" for a in self.actors.values() if a.at is not None]

    def _list_ready(self) -> list[Actor]:
        return [a for a in self.actors.values() if a.at is not None and a.at.ready()]

    def _can_afford(self, answer: str) -> bool:
        return self.remaining.get(answer.split(",")[0].split(":")[0], 0) > 0

    def _do(self, label: str) -> None:
        name, _, answer = label.partition(": ")
        if name in self.actors:
            actor = self.actors[name]
            if answer:
                self.remaining[answer.split(",")[0]] -= 1
            self._resume(actor, answer)
        elif label.endswith(" crashes"):
            self.remaining["crash"] -= 1
            self.outcome.trace.append(f"{label} before: {self.actors[label[:-8]].at.label}")  # type: ignore[union-attr]
            self.actors[label[:-8]].kill()
            self.current = None
        else:
            event = next(e for e in self.events() if e.label == label)
            self.remaining[event.budget] -= 1
            self.outcome.trace.append(f"-- {label}")
            event.act()
            for a in self.actors.values():
                a.changed = True

    def _resume(self, actor: Actor, answer: str) -> None:
        assert actor.at is not None
        before = self.fingerprint()
        line = f"{actor.name}: {actor.at.label}" + (f" ({answer})" if answer else "")
        at = len(self.outcome.trace)
        actor.history = hash((actor.history, actor.at.label, answer))
        self.stage.running = actor
        actor.resume(answer)
        self.stage.running = None
        self.current = None if actor.ended else actor
        actor.changed = self.fingerprint() != before
        if actor.ended:
            line += f"   [ends: {_describe_end(actor)}]"
        self.outcome.trace.insert(at, line)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.outcome.trace.append(text)

    def _state(self) -> int:
        actors = tuple(
            (a.name, a.history if not a.ended else None, a.ended, a.killed, repr(a.error)) for a in self.actors.values()
        )
        current = self.current.name if self.current else ""
        return hash((self.fingerprint(), actors, current, tuple(sorted(self.remaining.items()))))


def _describe_end(actor: Actor) -> str:
    error = actor.error
    return f"{type(error).__name__}: {str(error)[:120]}" if error else str(actor.result)
