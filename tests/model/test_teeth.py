"""Removes each rule of docs/developers/design/model-rules.md from Sluice's code: the exploration must find a
violation.

| rule (`FIX` of the model) | behaviour without the rule | violation |
|---|---|---|
| recheck | a writer that lost a number puts the same entry at the next one | plans overlap |
| floor | a replacement below the log start is not refused | landed offsets are recorded as lost |
| allow_fewer | a replacement is published with fewer records than it replaces | landed rows are gone |
| lossfirst | a loss ignores the reservations of live plans | offsets are both lost and landed |
| reclamp | a boundary is not clamped to its neighbours again | boundaries decrease |
| ackfrom | an accept takes the current incarnation, whichever it is | an incarnation is entered twice |
| – | marks of another ledger are no reason to refuse | a feed begins where that ledger committed |
| mine | our own marks and intents are not recognised | a false alarm |
| none | expired offsets count as moved | a false alarm |
| relook | a refusal is not checked a second time | a false alarm |
| relist | the ledger is read before the committed offsets | a false alarm |
| readmark | the read-back compares offsets alone | letters are never sent |
| deadletters | a commit sends the letters of the newest batch alone | letters are never sent |
| fromorigin | the frontier begins at the lowest landed offset | a false alarm |
| latepart | a later partition opens no window | windows are never complete |
| – | a plan that cannot be carried out stays live | no clean run reaches the last stable offset |
| – | a replacement takes the requested offset ranges, not those that share a file with them | rows without a range |
| – | a replacement continues without a range of the file that Kafka has deleted | rows are missing |
| – | a replay writes its ranges again, not those that share a file with them | rows without a range |
| – | only replaced parts that the state still remembers count as replaced | deleted files reappear |
| – | windows count as declared although their manifests were never written | complete windows are not declared |
| – | records that are ahead end windows | records outside of their window |
| – | records are written to another output than theirs | rows in another output |
| – | landings do not leave erased records out, and the fold does not refuse them | erased records are back |
| – | an erasure does not wait for live plans of its offsets, and the fold does not refuse them | a plan reserves them |
| – | compaction writes rows again that an erasure is about to remove, and the fold does not refuse them | rows stay |
| – | an erasure takes its offset ranges, not those that share a file with them | rows without a range |
| – | look-ups by time take markers for records, as Kafka's do (a port's rule) | records outside of their window |

The model's other rules live in ports (`link`, `generation`, `tidcheck`), or hold by construction and cannot be removed
in one line (`batchid`, `names`, `atomic`, `onlydead`, `pick`, `perpart`, `incarn`, `ackabandons`, `manifest`).
`rollfold` and `rmfirst` are tested in `tests/pipelines/publishing/test_publish.py`. Without `guard` alone no violation
was found: the owner's token, the removed staging and the names of parts protect as well. Nor without `current` (a plan
is put for the incarnation of the survey): an accept records the pending offsets of the former incarnation as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from sluice.pipelines.batch import carry_out, land, survey
from sluice.pipelines.committing import commit
from sluice.pipelines.landing import proof
from sluice.pipelines.ledger import Appended, Ledger, State
from sluice.pipelines.ledger.entries import EraseEntry, dump
from sluice.pipelines.maintenance import erasure, rewrite
from sluice.pipelines.model.kafka import Key, OffsetAtTime, find_contiguous_end
from sluice.pipelines.operating import acceptance
from sluice.pipelines.planning import plan, windows
from sluice.pipelines.planning.boundary_search import Sample
from sluice.pipelines.publishing import manifest
from sluice.pipelines.quarantine import dead_letters
from sluice.pipelines.records.split_format import Router
from tests.model.explore import Violation, explore_scenario
from tests.model.scenarios import BY_NAME
from tests.model.world import Kafka

Patch = pytest.MonkeyPatch


def recheck(patch: Patch) -> None:
    def append(self: Ledger, decide: Callable[[State], Any]) -> Appended | None:
        entry = decide(self.read())
        while entry is not None:
            state = self.read()
            data = dump(stamped := self._stamp(entry, state))
            if self._create(state.number, stamped, data):
                self._state = state.extend([stamped])
                return Appended(state.number, stamped, self._state)
        return None

    patch.setattr(Ledger, "append", append)


def drop_floor(patch: Patch) -> None:
    unreadable = plan._explain_unreadable
    patch.setattr(
        plan, "_explain_unreadable", lambda request, *rest: unreadable(replace(request, replace=False), *rest)
    )


def allow_fewer(patch: Patch) -> None:
    patch.setattr(proof, "find_lost_rows", lambda *_: [])


def lossfirst(patch: Patch) -> None:
    patch.setattr(State, "list_reserved", lambda self, key: ())


def reclamp(patch: Patch) -> None:
    patch.setattr(windows._Neighbours, "clamp", lambda self, at, time, offset: offset)


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

    def judge_without_marks(state: State, key: Key, target: int, committed: Any) -> Any:
        plain = replace(committed, metadata="") if committed is not None else None
        return real(replace(state, intents={}), key, target, plain)

    patch.setattr(commit, "judge", judge_without_marks)


def none(patch: Patch) -> None:
    real = commit.judge

    def judge_strictly(state: State, key: Key, target: int, committed: Any) -> Any:
        return (
            commit.CommitVerdict.MOVED
            if committed is None and key in state.commits
            else real(state, key, target, committed)
        )

    patch.setattr(commit, "judge", judge_strictly)


def relook(patch: Patch) -> None:
    def compare_once(member: Any, ledger: Ledger, settings: Any, *_: Any) -> Any:
        committed = member.fetch_committed([k.tp for k in ledger.read().frontiers()])
        state = ledger.read()
        verdicts = {k: commit.judge(state, k, o, committed.get(k.tp)) for k, o in state.frontiers().items()}
        return _raise_refusal(ledger, state, committed, verdicts)

    patch.setattr(commit, "_compare", compare_once)


def relist(patch: Patch) -> None:
    def compare_early(member: Any, ledger: Ledger, settings: Any, *_: Any) -> Any:
        state = ledger.read()
        committed = member.fetch_committed([k.tp for k in state.frontiers()])
        verdicts = {k: commit.judge(state, k, o, committed.get(k.tp)) for k, o in state.frontiers().items()}
        return _raise_refusal(ledger, state, committed, verdicts)

    patch.setattr(commit, "_compare", compare_early)


def _raise_refusal(ledger: Ledger, state: State, committed: Any, verdicts: dict[Key, Any]) -> Any:
    if commit.CommitVerdict.STALE in verdicts.values():
        raise commit.build_lost_error(ledger.feed, state.newest, commit.find_traces(state, committed))
    if moved := [k for k, v in verdicts.items() if v is commit.CommitVerdict.MOVED]:
        raise commit._build_moved_error(ledger.feed, state, moved, committed, {})
    return state, committed


def readmark(patch: Patch) -> None:
    real = commit._read_back

    class Loose:
        """A member whose committed offsets seem to carry our mark."""

        def __init__(self, member: Any, meant: Any) -> None:
            self._member, self._meant = member, meant

        def fetch_committed(self, partitions: Sequence[Any]) -> Any:
            committed = self._member.fetch_committed(partitions)
            return {
                tp: self._meant[tp] if o and o.offset == self._meant[tp].offset else o for tp, o in committed.items()
            }

    patch.setattr(commit, "_read_back", lambda member, offsets: real(Loose(member, offsets), offsets))


def deadletters(patch: Patch) -> None:
    real = dead_letters.list_pending_letters

    def list_newest(ledger: Ledger, state: State, since: int) -> Any:
        published = [b.published for b in state.batches.values() if b.published is not None]
        return real(ledger, state, max([since, *(n - 1 for n in published)]))

    patch.setattr(dead_letters, "list_pending_letters", list_newest)


def fromorigin(patch: Patch) -> None:
    def find_frontier(self: State, key: Key) -> int:
        accounted = self.list_accounted(key)
        return find_contiguous_end(min([self.origins[key].offset, *(r.start for r in accounted)]), accounted)

    patch.setattr(State, "frontier", find_frontier)


def latepart(patch: Patch) -> None:
    opened = survey.with_first_windows

    def keep_windows(feed: Any, ports: Any, state: State, partitions: Any, origins: Any, now: int) -> Any:
        return origins if state.boundary_times else opened(feed, ports, state, partitions, origins, now)

    patch.setattr(survey, "with_first_windows", keep_windows)


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


def replay_alone(patch: Patch) -> None:
    patch.setattr(manifest, "with_sharers", lambda ledger, state, receipts: list(receipts))


def forget_replaced(patch: Patch) -> None:
    def list_replaced(self: Ledger, files: Iterable[str], state: State | None = None) -> frozenset[str]:
        return frozenset((state or self.read()).replaced).intersection(files)

    patch.setattr(Ledger, "list_replaced", list_replaced)


def declare_nothing(patch: Patch) -> None:
    patch.setattr(manifest._Declared, "since", lambda self, state, settings: set())


def accept_any_rows(patch: Patch) -> None:
    patch.setattr(State, "find_unerased", lambda self, r: ())


def land_erased(patch: Patch) -> None:
    accept_any_rows(patch)
    patch.setattr(State, "list_erased", lambda self, s: ())


def erase_at_once(patch: Patch) -> None:
    accept_any_rows(patch)

    def append(ledger: Ledger, liveness: Any, offsets: Any, reason: str, report: Any) -> Appended | None:
        def decide(state: State) -> EraseEntry | None:
            ranges = tuple(erasure._list_new(state, offsets))
            return EraseEntry(ranges=ranges, records=len(ranges), reason=reason) if ranges else None

        return ledger.append(decide)

    patch.setattr(erasure, "decide", append)


def merge_erased(patch: Patch) -> None:
    accept_any_rows(patch)
    patch.setattr(rewrite, "is_erasing", lambda state, piece: False)


def take_markers(patch: Patch) -> None:
    def find_first(self: Kafka, tp: Any, time: int) -> OffsetAtTime | None:
        records = p.records if (p := self._world.get_partition(tp)) else ()
        return next((OffsetAtTime(o, r.stamp) for o, r in enumerate(records) if r.stamp >= time), None)

    patch.setattr(Kafka, "first", find_first)


def believe(patch: Patch) -> None:
    patch.setattr(Sample, "is_ahead", lambda *_: False)


def trust_copies(patch: Patch) -> None:
    patch.setattr(survey, "_find_restored_logs", lambda *_: [])


def swap_outputs(patch: Patch) -> None:
    route = Router.route

    def shift(self: Router, s: Any, chunk: Any) -> Any:
        routed = route(self, s, chunk)
        return replace(routed, outputs=routed.outputs[::-1].copy())

    patch.setattr(Router, "route", shift)


TEETH: tuple[tuple[Callable[[Patch], None], str, str], ...] = (
    (recheck, "two runs", "I2|I4|I12"),
    (drop_floor, "again while retention takes", "I2"),
    (allow_fewer, "again while compaction takes", "I1"),
    (allow_fewer, "the rest again while compaction takes", "I1"),
    (lossfirst, "retention and a take-over", "I4"),
    (reclamp, "the open window", "W|I4"),
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
    (replay_alone, "side by side, replayed and landed again", "I1|I2"),
    (forget_replaced, "again, slow copies", "I1|I2"),
    (declare_nothing, "windows out of order", "W"),
    (take_markers, "lagging transactions", "I16"),
    (believe, "fast clocks", "I16"),
    (trust_copies, "restored from a copy", "I3"),
    (swap_outputs, "outputs, two runs", "I1|I6"),
    (land_erased, "erased and landed again", "I19"),
    (erase_at_once, "erased and landed again", "I19"),
    (merge_erased, "erased and merged", "I19"),
    (replay_alone, "side by side, erased", "I1|I2"),
    (replay_alone, "outputs, side by side, replayed and landed again", "I1|I2"),
)


LONG = (forget_replaced, lossfirst)
"""Rules whose absence is found only after thousands of schedules; they run with the soak tests."""


@pytest.mark.parametrize(
    ("rule", "scenario", "finds"),
    [pytest.param(*tooth, marks=pytest.mark.soak if tooth[0] in LONG else ()) for tooth in TEETH],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_missing_rule_is_detected(rule: Callable[[Patch], None], scenario: str, finds: str, monkeypatch: Patch) -> None:
    rule(monkeypatch)
    with pytest.raises(Violation, match=rf"^({finds})\d*[:/]"):
        explore_scenario(BY_NAME[scenario], max_runs=3000)
