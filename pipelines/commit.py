"""Moving the group's committed offsets to the frontier: fenced, and never in the way (DESIGN §7).

    1 join as the only member          refuse: GroupHeld
    2 init_transactions                fences an older committer of ours
    3 committed offsets (stable), then the ledger; compare    refuse: GroupMoved, LedgerCorrupt
    4 intent into the ledger, then one transaction with its number as the mark
    5 read back, offset and mark       a lost answer is unknown until then
    6 commit into the ledger; leave

Guarantee: the committed offset never passes anything unaccounted (invariant 7) and never goes back (invariant 8),
unless the feed's `on_group_moved: overwrite` says so. Landing does not wait for any of this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.errors import CommitFenced, GroupMoved, LedgerCorrupt, Unknown
from sluice.pipelines.feed import CommitMode, OnGroupMoved
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import CommitEntry, IntentEntry, KeyOffset, KeyRange
from sluice.pipelines.ports import Group, Membership
from sluice.pipelines.positions import skip_to
from sluice.pipelines.values import CommittedOffset, Key, TopicPartition

Committed = Mapping[TopicPartition, CommittedOffset | None]


@dataclass(frozen=True, slots=True)
class CommitSettings:
    mode: CommitMode
    transactional_id: str
    on_group_moved: OnGroupMoved


class CommitStatus(StrEnum):
    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Moved:
    """One partition's committed offset before (None: none) and after."""

    key: Key
    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    """`mark` is the number of the intent entry behind the offsets, −1 where none was written."""

    status: CommitStatus
    offsets: tuple[Moved, ...]
    mark: int = -1


class Verdict(StrEnum):
    DONE = "done"
    GO = "go"
    MOVED = "moved"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Mark:
    """What we store beside a committed offset: which ledger, which intent, which life of the topic."""

    ledger: str
    number: int
    incarnation: str

    def dump(self) -> str:
        return json.dumps({"sluice": self.ledger, "n": self.number, "i": self.incarnation}, separators=(",", ":"))

    @classmethod
    def parse(cls, metadata: str) -> Mark | None:
        """None for anything that we did not write."""
        try:
            raw = json.loads(metadata)
            return cls(str(raw["sluice"]), int(raw["n"]), str(raw["i"]))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None


def commit(ledger: Ledger, group: Group, settings: CommitSettings) -> CommitResult:
    """Commit the frontier of every partition that has an origin, by the numbered steps above.

    Raises GroupHeld, GroupMoved, CommitFenced (try again), Unknown (nobody could be asked), LedgerCorrupt.
    """
    state = ledger.read()
    targets = state.frontiers()
    if settings.mode is CommitMode.NONE or not targets:
        return CommitResult(CommitStatus.DISABLED, tuple(Moved(k, None, o) for k, o in targets.items()))
    if _settled(state, targets, group.committed([k.tp for k in targets])):
        return CommitResult(CommitStatus.UNCHANGED, tuple(Moved(k, o, o) for k, o in targets.items()))
    transactional = settings.mode is CommitMode.TRANSACTIONAL
    topics = sorted({k.topic for k in targets})
    with group.join(topics, settings.transactional_id if transactional else None) as member:
        if transactional:
            member.init_transactions()
        return _commit_as(member, ledger, settings)


def _settled(state: State, targets: Mapping[Key, int], committed: Committed) -> bool:
    """Kafka holds the frontier and the ledger knows it: nothing to join the group for."""
    return all(
        state.commits.get(key) == to and (held := committed.get(key.tp)) is not None and held.offset == to
        for key, to in targets.items()
    )


def _commit_as(member: Membership, ledger: Ledger, settings: CommitSettings) -> CommitResult:
    state, before = _compare(member, ledger, settings)
    targets = state.frontiers()
    going = {k: o for k, o in targets.items() if verdict(state, k, o, before.get(k.tp)) is not Verdict.DONE}
    mark = _intend(ledger, targets)
    if going:
        offsets = {k.tp: _marked(state, k, o, mark) for k, o in going.items()}
        _send(member, settings, offsets)
        _read_back(member, offsets)
    _record(ledger, settings, mark, targets)
    status = CommitStatus.COMMITTED if going else CommitStatus.UNCHANGED
    return CommitResult(status, tuple(Moved(k, _offset(before.get(k.tp)), o) for k, o in targets.items()), mark)


def _compare(member: Membership, ledger: Ledger, settings: CommitSettings) -> tuple[State, Committed]:
    """Step 3. A refusal must survive a second look: a run that slept in between compares old with new."""
    for last in (False, True):
        tps = [k.tp for k in ledger.read().frontiers()]
        committed = member.committed(tps)
        state = ledger.read()
        verdicts = {k: verdict(state, k, o, committed.get(k.tp)) for k, o in state.frontiers().items()}
        if Verdict.STALE in verdicts.values() and last:
            raise _stale(state, verdicts, committed)
        moved = [k for k, v in verdicts.items() if v is Verdict.MOVED]
        if moved and last:
            return _resolve_moved(ledger, settings, moved, state, committed), committed
        if not moved and Verdict.STALE not in verdicts.values():
            break
    return state, committed


def verdict(state: State, key: Key, target: int, committed: CommittedOffset | None) -> Verdict:
    """May this partition's committed offset go from what Kafka holds to `target`?"""
    if committed is None:
        return Verdict.GO  # never committed, or expired after idle days: nobody moved it
    offset, last = committed.offset, state.commits.get(key)
    mark = _our_mark(state, committed)
    if offset == target:
        return Verdict.DONE
    if mark is not None and mark.number >= state.number:
        return Verdict.STALE
    if mark is not None and mark.incarnation != key.incarnation:
        return Verdict.GO  # belongs to the topic's earlier life
    if offset == state.moved.get(key):
        return Verdict.GO  # put there by hand, and the ledger knows
    expected = last if last is not None else state.origins[key].committed
    if offset == expected and offset < target:
        return Verdict.GO
    ours = mark is not None or offset in state.intents.get(key, ())
    if ours and (last is None or last <= offset) and offset <= target:
        return Verdict.GO
    return Verdict.MOVED


def _our_mark(state: State, committed: CommittedOffset) -> Mark | None:
    mark = Mark.parse(committed.metadata)
    return mark if mark is not None and mark.ledger == state.ledger_id else None


def _resolve_moved(
    ledger: Ledger, settings: CommitSettings, moved: Sequence[Key], state: State, committed: Committed
) -> State:
    if settings.on_group_moved is OnGroupMoved.REFUSE:
        raise _moved(ledger.feed, state, moved, committed)
    if settings.on_group_moved is OnGroupMoved.ADOPT:
        adopt(ledger, moved, committed, "on_group_moved: adopt")
        return ledger.read()
    return state


def adopt(ledger: Ledger, moved: Sequence[Key], committed: Committed, reason: str) -> tuple[KeyRange, ...]:
    """Skip what lies between the frontier and the group's offset: whoever moved it passed it over. What was skipped."""
    ends = {key: _offset(committed.get(key.tp)) or 0 for key in moved}
    return skip_to(ledger, ends, reason)


def _intend(ledger: Ledger, targets: Mapping[Key, int]) -> int:
    offsets = tuple(KeyOffset(key=k, offset=o) for k, o in targets.items())
    appended = ledger.append(lambda state: IntentEntry(offsets=offsets))
    return appended.number if appended else -1


def _marked(state: State, key: Key, offset: int, mark: int) -> CommittedOffset:
    _, epoch = state.epochs.get(key, (0, -1))
    return CommittedOffset(offset, epoch, Mark(state.ledger_id, mark, key.incarnation).dump())


def _send(member: Membership, settings: CommitSettings, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
    """Step 4. An unknown outcome is no failure yet: reading back decides."""
    try:
        if settings.mode is CommitMode.TRANSACTIONAL:
            member.commit_transaction(offsets)
        else:
            member.commit_plain(offsets)
    except Unknown:
        return


def _read_back(member: Membership, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
    seen = member.committed(list(offsets))
    for tp, meant in offsets.items():
        held = seen.get(tp)
        if held is None or (held.offset, held.metadata) != (meant.offset, meant.metadata):
            raise CommitFenced(
                f"{tp}: meant to commit {meant.offset}, Kafka holds {_offset(held)}: the commit did not take",
                remedy="nothing is lost; the next run commits again",
                topic=tp.topic,
                partition=tp.partition,
            )


def _record(ledger: Ledger, settings: CommitSettings, mark: int, targets: Mapping[Key, int]) -> None:
    offsets = tuple(KeyOffset(key=k, offset=o) for k, o in targets.items())

    def decide(state: State) -> CommitEntry | None:
        if all(state.commits.get(k, -1) >= o and k not in state.moved for k, o in targets.items()):
            return None
        return CommitEntry(mode=settings.mode, mark=mark, offsets=offsets)

    ledger.append(decide)


def _offset(committed: CommittedOffset | None) -> int | None:
    return None if committed is None else committed.offset


def _moved(feed: str, state: State, moved: Sequence[Key], committed: Committed) -> GroupMoved:
    def line(key: Key) -> str:
        last = state.commits.get(key)
        expected = last if last is not None else state.origins[key].committed
        held = _offset(committed.get(key.tp))
        return f"{key}: Kafka holds {held}, the ledger expects {expected} (frontier {state.frontier(key)})"

    first = moved[0]
    return GroupMoved(
        "somebody moved the group's committed offsets; " + "; ".join(map(line, moved)),
        remedy=f"commit the frontier all the same: sluice accept {feed} moved --reason …; or take over the group's"
        " offsets, and record what they pass over as skipped: the same with --adopt. `policies.on_group_moved` in the"
        " feed decides it for good",
        topic=first.topic,
        partition=first.partition,
    )


def _stale(state: State, verdicts: Mapping[Key, Verdict], committed: Committed) -> LedgerCorrupt:
    key = next(k for k, v in verdicts.items() if v is Verdict.STALE)
    held = committed[key.tp]
    return LedgerCorrupt(
        f"{key}: the committed offset carries a mark of this ledger above its last entry ({state.number - 1}): "
        f"the ledger lost entries ({held.metadata if held else ''})",
        remedy="restore the ledger from a backup of the lake; nothing was changed",
        topic=key.topic,
        partition=key.partition,
    )
