"""Actors that run real code in threads of their own, one at a time: each effect on a port hands control back.

A schedule is what deviates from the plain one, in which an actor runs until it ends and then the next one does:
`(step, label)` pairs, a label being another actor, another answer, a crash, or something that happens by itself. The
same deviations give the same run. A crashed actor's thread unwinds without any effect: nothing tidies up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

Deviation = tuple[int, str]


class Killed(BaseException):
    """The process is gone: nothing runs any more, not even what tidies up."""


_ACTORS: WeakKeyDictionary[threading.Thread, Actor] = WeakKeyDictionary()


def current_actor() -> Actor | None:
    """Whose thread asks."""
    return _ACTORS.get(threading.current_thread())


@dataclass
class Point:
    """The effect that an actor is about to have. `answers`: those that it may get besides the plain one."""

    label: str
    ready: Callable[[], bool]
    answers: tuple[str, ...]


class Actor:
    """One run, in a thread that waits for its turn."""

    def __init__(self, name: str, program: Callable[[], object]) -> None:
        self.name, self._program = name, program
        self.at: Point | None = Point("begins", lambda: True, ())
        self.answer = ""
        self.killed = False
        self.result: object = None
        self.error: BaseException | None = None
        self.history = hash(name)
        """Stands for all that it has seen: two actors of one name with one history are in the same state."""
        self.changed = True
        """Whether it has had an effect since it could have crashed last."""
        self._turn = threading.Lock()
        self._turn.acquire()
        self.writes = 0
        """How many ids of writes it has drawn."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        _ACTORS[self.thread] = self
        self._back = threading.Lock()
        self._back.acquire()
        self.thread.start()

    @property
    def ended(self) -> bool:
        return self.at is None

    def resume(self, answer: str = "") -> None:
        """Let it run up to its next effect, or its end."""
        self.answer = answer
        self._turn.release()
        self._back.acquire()

    def wait(self, point: Point) -> str:
        """In its own thread: stop before an effect. Its answer. Raises Killed."""
        self.alive()
        self.at = point
        self._back.release()
        self._turn.acquire()
        self.alive()
        return self.answer

    def alive(self) -> None:
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
            self.alive()
            self.result = self._program()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - it is told with the trace
            self.error = error
        finally:
            self.at = None
            self._back.release()


class Stage:
    """Where ports ask whose turn it is. Without actors every effect happens at once."""

    def __init__(self) -> None:
        self.running: Actor | None = None

    def point(self, label: str, ready: Callable[[], bool] = lambda: True, answers: Sequence[str] = ()) -> str:
        """Before an effect: the answer that it is to give, empty for the plain one. Raises Killed."""
        actor = self.running
        return actor.wait(Point(label, ready, tuple(answers))) if actor else ""

    def saw(self, what: object) -> None:
        """An answer that the running actor got."""
        if (actor := self.running) is not None:
            actor.alive()
            actor.history = hash((actor.history, what if isinstance(what, bytes | str | int) else repr(what)))


@dataclass
class Event:
    """Something that happens by itself, so many times at most."""

    label: str
    budget: str
    act: Callable[[], None]


@dataclass
class Ran:
    """One schedule carried out. `choices` has, by step, what could have been chosen instead."""

    trace: list[str] = field(default_factory=list)
    choices: list[tuple[str, ...]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    broken: str = ""
    converged: bool = False
    """It came to a state from which everything had been tried."""


class Schedule:
    """One run of actors. `events` says what may happen by itself now, `fingerprint` what the world is like, `broken`
    whether it is as it must be, `release` ends waits that only time ends."""

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
        self.stage, self.events, self.left = stage, events, dict(budgets)
        self.fingerprint, self.broken, self.release = fingerprint, broken, release
        self.actors = {name: Actor(name, program) for name, program in programs.items()}
        self.current: Actor | None = None
        self.ran = Ran()

    def actor(self, name: str) -> Actor | None:
        return self.actors.get(name)

    def run(
        self,
        deviations: Iterable[Deviation],
        known: Callable[[int, int], bool] = lambda state, left: False,
        choose: Callable[[int, Sequence[str]], str] | None = None,
        most: int = 3000,
    ) -> Ran:
        """Carry it out. `known(state, deviations left)` ends it early; `choose` picks by itself instead."""
        planned = dict(deviations)
        ran = self.ran
        try:
            for step in range(most):
                if ran.broken or not (labels := self._labels()):
                    return ran
                last = not any(at >= step for at in planned)
                if last and choose is None:
                    state = self._state()
                    if known(state, step):
                        ran.converged = True
                        return ran
                    ran.states.append(state)
                ran.choices.append(labels)
                wanted = choose(step, labels) if choose else planned.pop(step, labels[0])
                self._do(wanted if wanted in labels else labels[0])
                ran.broken = self.broken()
            ran.broken = ran.broken or f"no end after {most} steps"
            return ran
        finally:
            self.stage.running = None
            for actor in self.actors.values():
                actor.kill()

    def _labels(self) -> tuple[str, ...]:
        """What can happen now, the plain choice first; nothing once all actors have ended."""
        ready = self._ready()
        if not ready and any(not a.ended for a in self.actors.values()):
            if not self.release():
                self.ran.broken = "nobody can go on: " + ", ".join(self.waiting())
                return ()
            self.ran.trace.append("-- time passes: what waits only for that goes on")
            ready = self._ready()
        if not ready:
            return ()
        first = self.current if self.current in ready else ready[0]
        assert first is not None
        assert first.at is not None
        out = [first.name]
        out += [f"{first.name}: {answer}" for answer in first.at.answers if self._affords(answer)]
        out += [a.name for a in ready if a is not first]
        if first.changed and self._affords("crash") and first.at.label != "begins":
            out.append(f"{first.name} crashes")
        return (*out, *(e.label for e in self.events() if self.left.get(e.budget, 0) > 0))

    def waiting(self) -> list[str]:
        return [f"{a.name} before {a.at.label}" for a in self.actors.values() if a.at is not None]

    def _ready(self) -> list[Actor]:
        return [a for a in self.actors.values() if a.at is not None and a.at.ready()]

    def _affords(self, answer: str) -> bool:
        return self.left.get(answer.split(",")[0].split(":")[0], 0) > 0

    def _do(self, label: str) -> None:
        name, _, answer = label.partition(": ")
        if name in self.actors:
            actor = self.actors[name]
            if answer:
                self.left[answer.split(",")[0]] -= 1
            self._resume(actor, answer)
        elif label.endswith(" crashes"):
            self.left["crash"] -= 1
            self.ran.trace.append(f"{label} before: {self.actors[label[:-8]].at.label}")  # type: ignore[union-attr]
            self.actors[label[:-8]].kill()
            self.current = None
        else:
            event = next(e for e in self.events() if e.label == label)
            self.left[event.budget] -= 1
            self.ran.trace.append(f"-- {label}")
            event.act()
            for a in self.actors.values():
                a.changed = True

    def _resume(self, actor: Actor, answer: str) -> None:
        assert actor.at is not None
        before = self.fingerprint()
        line = f"{actor.name}: {actor.at.label}" + (f" ({answer})" if answer else "")
        at = len(self.ran.trace)
        actor.history = hash((actor.history, actor.at.label, answer))
        self.stage.running = actor
        actor.resume(answer)
        self.stage.running = None
        self.current = None if actor.ended else actor
        actor.changed = self.fingerprint() != before
        if actor.ended:
            line += f"   [ends: {_end(actor)}]"
        self.ran.trace.insert(at, line)

    def note(self, text: str) -> None:
        """A line of the trace beside those of effects."""
        self.ran.trace.append(text)

    def _state(self) -> int:
        actors = tuple(
            (a.name, a.history if not a.ended else None, a.ended, a.killed, repr(a.error)) for a in self.actors.values()
        )
        current = self.current.name if self.current else ""
        return hash((self.fingerprint(), actors, current, tuple(sorted(self.left.items()))))


def _end(actor: Actor) -> str:
    error = actor.error
    return f"{type(error).__name__}: {str(error)[:120]}" if error else str(actor.result)
