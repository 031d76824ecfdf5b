"""Removes each rule of docs/developers/design/model-rules.md from Sluice's code: the exploration must find the
breakage.

| rule (`FIX` of the model) | what is taken out | what is found |
|---|---|---|
| recheck | a writer that lost the number puts the same entry at the next | plans that overlap |
| floor | a replace below the log start is not refused | landed offsets that are named lost |
| lossfirst | a loss takes no notice of what live plans reserve | offsets that are lost and landed |
| reclamp | a boundary is put as it was found | boundaries that decrease |
| current | a plan is put for the life that the survey saw | a plan in a life that was left |
| ackfrom | an accept takes whatever life is current | a life that is entered twice |
| – | another ledger's marks are no reason to refuse | a feed that begins where that one committed |
| mine | our own marks and intents are not known again | an alarm that is not true |
| none | expired offsets count as moved | an alarm that is not true |
| relook | a refusal is not looked at a second time | an alarm that is not true |
| relist | the ledger is read before the committed offsets | an alarm that is not true |
| readmark | what is read back is compared by offset alone | letters that were never sent |
| deadletters | only the newest batch's letters ride along | letters that were never sent |
| fromorigin | the frontier begins at the lowest landed offset | an alarm that is not true |
| latepart | a partition that comes later opens no window | windows that are never complete |
| – | a plan that nobody can carry out stays live | no clean run reaches the last stable offset |
| – | landing again takes the offset ranges it was asked for, and not those that share a file with them | rows of nobody
|
| – | landing again goes on without a range of the file that Kafka no longer has | rows that are nowhere |
| – | a replay writes its ranges again, and not those beside them | rows of nobody |
| – | parts that no longer count are those that the state has not forgotten | files that came back |
| – | windows are declared to have manifests that nobody wrote | complete windows that nobody declared |
| – | look-ups by time take markers for records, as Kafka's do (a port's rule) | records beside their window |

The others of the model's rules live in ports (`link`, `generation`, `tidcheck`), or are by construction here and cannot
be taken out in a line (`batchid`, `names`, `atomic`, `onlydead`, `pick`, `perpart`, `incarn`, `ackabandons`,
`manifest`). `rollfold` and `rmfirst` have theirs in `tests/pipelines/publishing/test_publish.py`. Without `guard`
alone nothing was found: the owner's token, the staging that went and the names of parts hold it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from sluice.pipelines.batch import carry_out, land, survey
from sluice.pipelines.committing import commit
from sluice.pipelines.ledger import Appended, Ledger, State
from sluice.pipelines.model.kafka import Key, OffsetAtTime, find_contiguous_end
from sluice.pipelines.operating import acceptance
from sluice.pipelines.planning import plan, windows
from sluice.pipelines.publishing import manifest
from sluice.pipelines.quarantine import dead_letters
from tests.model.explore import Violation, explored
from tests.model.scenarios import BY_NAME
from tests.model.world import Kafka

Patch = pytest.MonkeyPatch


def recheck(patch: Patch) -> None:
    def append(self: Ledger, decide: Callable[[State], Any]) -> Appended | None:
        entry = decide(self.read())
        while entry is not None:
            state = self.read()
            if self._create(state.number, stamped := self._stamp(entry)):
                self._state = state.extend([stamped])
                return Appended(state.number, stamped, self._state)
        return None

    patch.setattr(Ledger, "append", append)


def floor(patch: Patch) -> None:
    unreadable = plan._explain_unreadable
    patch.setattr(
        plan, "_explain_unreadable", lambda request, *rest: unreadable(replace(request, replace=False), *rest)
    )


def lossfirst(patch: Patch) -> None:
    patch.setattr(State, "list_reserved", lambda self, key: ())


def reclamp(patch: Patch) -> None:
    patch.setattr(windows._Neighbours, "clamp", lambda self, at, time, offset: offset)


def current(patch: Patch) -> None:
    patch.setattr(land, "_on_newer_state", lambda found, *_: found)


def ackfrom(patch: Patch) -> None:
    class Newest(dict[Any, Any]):
        def __init__(self, ledger: Blind) -> None:
            super().__init__(ledger._state.current)
            self._ledger = ledger

        def get(self, tp: Any, default: Any = None) -> Any:
            return self._ledger._state.current.get(tp, default)

    class Blind(Ledger):
        def read(self) -> State:
            state = super().read()
            self._state = State(**{f.name: getattr(state, f.name) for f in fields(state)})
            return replace(self._state, current=Newest(self))

    patch.setattr(acceptance, "Ledger", Blind)


def mine(patch: Patch) -> None:
    real = commit.judge

    def forgetful(state: State, key: Key, target: int, held: Any) -> Any:
        plain = replace(held, metadata="") if held is not None else None
        return real(replace(state, intents={}), key, target, plain)

    patch.setattr(commit, "judge", forgetful)


def none(patch: Patch) -> None:
    real = commit.judge

    def strict(state: State, key: Key, target: int, held: Any) -> Any:
        return commit.CommitVerdict.MOVED if held is None and key in state.commits else real(state, key, target, held)

    patch.setattr(commit, "judge", strict)


def relook(patch: Patch) -> None:
    def once(member: Any, ledger: Ledger, settings: Any, *_: Any) -> Any:
        committed = member.fetch_committed([k.tp for k in ledger.read().frontiers()])
        state = ledger.read()
        found = {k: commit.judge(state, k, o, committed.get(k.tp)) for k, o in state.frontiers().items()}
        return _refused(ledger, state, committed, found)

    patch.setattr(commit, "_compare", once)


def relist(patch: Patch) -> None:
    def before(member: Any, ledger: Ledger, settings: Any, *_: Any) -> Any:
        state = ledger.read()
        committed = member.fetch_committed([k.tp for k in state.frontiers()])
        found = {k: commit.judge(state, k, o, committed.get(k.tp)) for k, o in state.frontiers().items()}
        return _refused(ledger, state, committed, found)

    patch.setattr(commit, "_compare", before)


def _refused(ledger: Ledger, state: State, committed: Any, found: dict[Key, Any]) -> Any:
    if commit.CommitVerdict.STALE in found.values():
        raise commit._build_stale_error(ledger.feed, state, committed)
    if moved := [k for k, v in found.items() if v is commit.CommitVerdict.MOVED]:
        raise commit._build_moved_error(ledger.feed, state, moved, committed, {})
    return state, committed


def readmark(patch: Patch) -> None:
    real = commit._read_back

    class Loose:
        """Committed offsets that look as if they carried our mark."""

        def __init__(self, member: Any, meant: Any) -> None:
            self._member, self._meant = member, meant

        def fetch_committed(self, partitions: Sequence[Any]) -> Any:
            seen = self._member.fetch_committed(partitions)
            return {tp: self._meant[tp] if o and o.offset == self._meant[tp].offset else o for tp, o in seen.items()}

    patch.setattr(commit, "_read_back", lambda member, offsets: real(Loose(member, offsets), offsets))


def deadletters(patch: Patch) -> None:
    real = dead_letters.list_pending_letters

    def newest(ledger: Ledger, state: State, since: int) -> Any:
        published = [b.published for b in state.batches.values() if b.published is not None]
        return real(ledger, state, max([since, *(n - 1 for n in published)]))

    patch.setattr(dead_letters, "list_pending_letters", newest)


def fromorigin(patch: Patch) -> None:
    def frontier(self: State, key: Key) -> int:
        held = self.list_accounted(key)
        return find_contiguous_end(min([self.origins[key].offset, *(r.start for r in held)]), held)

    patch.setattr(State, "frontier", frontier)


def latepart(patch: Patch) -> None:
    opened = survey.with_first_windows

    def never(feed: Any, edges: Any, state: State, partitions: Any, origins: Any, now: int) -> Any:
        return origins if state.boundary_times else opened(feed, edges, state, partitions, origins, now)

    patch.setattr(survey, "with_first_windows", never)


def credulous(patch: Patch) -> None:
    for module in (survey, land):
        patch.setattr(module, "check_owner", lambda *_, **__: None)


def held_for_ever(patch: Patch) -> None:
    for module in (land, carry_out):
        patch.setattr(module, "explain_impossible", lambda *_: "")


def widened(patch: Patch) -> None:
    patch.setattr(survey, "with_sharers", lambda ledger, state, receipts: list(receipts))


def whole_files(patch: Patch) -> None:
    patch.setattr(plan, "_check_whole_files", lambda due, replaced: None)


def beside(patch: Patch) -> None:
    patch.setattr(manifest, "with_sharers", lambda ledger, state, receipts: list(receipts))


def forgotten(patch: Patch) -> None:
    def list_replaced(self: Ledger, named: Iterable[str], state: State | None = None) -> frozenset[str]:
        return frozenset((state or self.read()).replaced).intersection(named)

    patch.setattr(Ledger, "list_replaced", list_replaced)


def undeclared(patch: Patch) -> None:
    patch.setattr(manifest._Declared, "since", lambda self, state, settings: set())


def markers(patch: Patch) -> None:
    def first(self: Kafka, tp: Any, time: int) -> OffsetAtTime | None:
        records = p.records if (p := self._world.now_of(tp)) else ()
        return next((OffsetAtTime(o, r.stamp) for o, r in enumerate(records) if r.stamp >= time), None)

    patch.setattr(Kafka, "first", first)


TEETH: tuple[tuple[Callable[[Patch], None], str, str], ...] = (
    (recheck, "two runs", "I2|I4|I12"),
    (floor, "again while retention takes", "I2"),
    (lossfirst, "retention and a take-over", "I4"),
    (reclamp, "the open window", "W|I4"),
    (current, "recreated by windows", "I12"),
    (ackfrom, "recreated, accepted twice", "A"),
    (mine, "a commit that was not told", "A"),
    (none, "offsets expire", "A"),
    (relook, "commits", "A"),
    (relist, "commits", "A"),
    (readmark, "letters alone", "DL"),
    (deadletters, "letters", "DL"),
    (fromorigin, "far below the origin", "A|I8"),
    (latepart, "a partition later", "I14"),
    (credulous, "the lake is removed", "I8"),
    (held_for_ever, "retention", "I14"),
    (widened, "side by side, again", "I1|I2"),
    (whole_files, "side by side, again while retention takes", "I1|I2"),
    (beside, "side by side, replayed and landed again", "I1|I2"),
    (forgotten, "again, slow copies", "I1|I2"),
    (undeclared, "windows out of order", "W"),
    (markers, "lagging transactions", "I16"),
)


LONG = (forgotten, lossfirst)
"""Found after thousands of schedules: these run with the soak tests."""


@pytest.mark.parametrize(
    ("rule", "scenario", "finds"),
    [pytest.param(*tooth, marks=pytest.mark.soak if tooth[0] in LONG else ()) for tooth in TEETH],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_without_the_rule_something_breaks(
    rule: Callable[[Patch], None], scenario: str, finds: str, monkeypatch: Patch
) -> None:
    rule(monkeypatch)
    with pytest.raises(Violation, match=rf"^({finds})\d*[:/]"):
        explored(BY_NAME[scenario], most=3000)
