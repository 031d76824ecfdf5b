"""Moves the group's committed offsets to the frontier: fenced, never blocking landing.

Design: docs/developers/design/commit-fence.md

    1 own the partitions (ZooKeeper), join as the only member    refuse: GroupHeld
    2 init_transactions                fences an older committer of ours
    3 committed offsets (stable), then the ledger; compare    refuse: GroupMoved, EntriesLost, ForeignMarks
    4 intent into the ledger, then one transaction with its number as the mark, and the pending dead letters
    5 read back offset and mark        until then a lost response leaves the outcome unknown
    6 commit into the ledger; leave

Guarantee: the committed offset never passes an offset that is not accounted for (invariant 7) and never goes back
(invariant 8), unless the feed has `on_group_moved: overwrite`. Landing does not wait for the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from sluice.pipelines.errors import (
    CommitFenced,
    GroupMoved,
    KafkaUnavailable,
    LedgerCorrupt,
    Unknown,
    UnknownTopic,
)
from sluice.pipelines.feed.sections import CommitMode, OnGroupMoved
from sluice.pipelines.ledger import Ledger, State
from sluice.pipelines.ledger.entries import CommitEntry, IntentEntry, KeyOffset, KeyRange
from sluice.pipelines.ledger.marks import (
    Committed,
    Mark,
    build_foreign_error,
    find_foreign_mark,
    find_foreign_marks,
    find_traces,
)
from sluice.pipelines.ledger.tip import build_lost_error
from sluice.pipelines.model.kafka import CommittedOffset, Isolation, Key, TopicPartition
from sluice.pipelines.planning.origins import skip_to
from sluice.pipelines.ports import Cluster, Group, Membership
from sluice.pipelines.util.documents import Flat

if TYPE_CHECKING:
    from sluice.pipelines.quarantine.dead_letters import Letters, Outlet


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
class CommittedMove:
    """One partition's committed offset before (None: none) and after."""

    key: Flat[Key]
    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    """`mark` is the number of the intent entry behind the offsets, or −1 if none was written.

    `dead_letters` records went to the topic `dead_letters_to` with them. `left_out` are partitions whose log was
    replaced, or that Kafka no longer has; their offsets stay. `put_by_others` are offsets that others had committed
    ahead of landing, and that landing has reached. `waiting` are partitions whose committed offset (`before`) comes
    from lost entries of the ledger, or was adopted beyond a live batch: landing has reached `after`, and must reach
    `before` first.
    """

    status: CommitStatus
    offsets: tuple[CommittedMove, ...]
    mark: int = -1
    dead_letters: int = 0
    dead_letters_to: str = ""
    left_out: tuple[Flat[Key], ...] = ()
    put_by_others: tuple[CommittedMove, ...] = ()
    waiting: tuple[CommittedMove, ...] = ()


class CommitVerdict(StrEnum):
    DONE = "done"
    GO = "go"
    WAITS = "waits"
    MOVED = "moved"
    STALE = "stale"
    FOREIGN = "foreign"


def commit(
    ledger: Ledger,
    group: Group,
    settings: CommitSettings,
    outlet: Outlet | None = None,
    cluster: Cluster | None = None,
    changed: Collection[TopicPartition] = (),
) -> CommitResult:
    """Commit the frontier of every partition that has an origin, by the numbered steps above.

    With an `outlet` (transactional commits only) the pending dead letters are sent along; they alone are sufficient
    reason to commit. `cluster` provides the ends of logs; without it no offset is adopted. Partitions whose log has
    `changed` are left out: the frontier belongs to an earlier life. So are those that Kafka no longer has.

    Raises GroupHeld, GroupMoved, CommitFenced (try again), Unknown (Kafka did not answer), EntriesLost, ForeignMarks.
    Dead letters may raise UnknownTopic, UsageError, LakeUnavailable and ProofFailed.
    """
    state = ledger.read()
    targets = _choose_targets(state, changed)
    left_out = tuple(k for k in state.frontiers() if k not in targets)
    if settings.mode is CommitMode.NONE or not targets:
        moved = tuple(CommittedMove(k, None, o) for k, o in targets.items())
        return CommitResult(CommitStatus.DISABLED, moved, left_out=left_out)
    pending = False
    if outlet:
        from sluice.pipelines.quarantine.dead_letters import list_pending_letters  # late: it needs Arrow

        pending = bool(list_pending_letters(ledger, state, state.last_mark))
    # Most runs change nothing: without joining the group, they leave no generation and no mark.
    if not pending and _is_settled(state, targets, group.fetch_committed([k.tp for k in targets])):
        same = tuple(CommittedMove(k, o, o) for k, o in targets.items())
        return CommitResult(CommitStatus.UNCHANGED, same, left_out=left_out)
    transactional = settings.mode is CommitMode.TRANSACTIONAL
    topics = sorted({k.topic for k in targets})
    group.own(lambda: [k.tp for k in targets], lambda: None)
    try:
        with group.join(topics, settings.transactional_id if transactional else None) as member:
            if transactional:
                member.init_transactions()
            done = _commit_as(member, ledger, settings, outlet if transactional else None, cluster, changed)
    except UnknownTopic:
        # Kafka no longer has a topic of an earlier landing: the offsets of the others need not wait for it.
        if not (absent := _find_absent(cluster, targets)):
            raise
        return commit(ledger, group, settings, outlet, cluster, {*changed, *absent})
    return replace(done, left_out=left_out)


def _find_absent(cluster: Cluster | None, keys: Iterable[Key]) -> set[TopicPartition]:
    """Returns the partitions that Kafka does not have, or does not show: it takes no offsets for them."""
    wanted = {k.tp for k in keys}
    if cluster is None:
        return set()
    cluster.forget()
    topics = cluster.topics().keys() & {tp.topic for tp in wanted}
    return wanted - {p.tp for p in cluster.partitions(topics, Isolation.READ_UNCOMMITTED)}


def _choose_targets(state: State, changed: Collection[TopicPartition]) -> dict[Key, int]:
    """Returns the offset to commit for each partition."""
    return {k: o for k, o in state.frontiers().items() if k.tp not in changed}


def _is_settled(state: State, targets: Mapping[Key, int], committed: Committed) -> bool:
    """Returns whether Kafka has the frontier and the ledger knows it, so that the run need not join the group."""
    return all(
        state.commits.get(key) == to
        and (offset := committed.get(key.tp)) is not None
        and offset.offset == to
        and offset.settled
        and find_foreign_mark(state, key.tp, offset) is None
        for key, to in targets.items()
    )


def _commit_as(
    member: Membership,
    ledger: Ledger,
    settings: CommitSettings,
    outlet: Outlet | None,
    cluster: Cluster | None,
    changed: Collection[TopicPartition],
) -> CommitResult:
    # As a member: from here on, the coordinator fences everybody else.
    state, before = _compare(member, ledger, settings, cluster, changed)
    partitions = member.partitions_of(outlet.topic) if outlet else 0
    verdicts = {k: judge(state, k, o, before.get(k.tp)) for k, o in _choose_targets(state, changed).items()}
    if settings.on_group_moved is OnGroupMoved.ADOPT:  # a live batch reserves offsets that the move passed over
        verdicts |= {
            k: CommitVerdict.WAITS
            for k, v in verdicts.items()
            if v is CommitVerdict.MOVED and (_get_offset(before.get(k.tp)) or 0) > state.frontier(k)
        }
    targets = {k: o for k, o in _choose_targets(state, changed).items() if verdicts[k] is not CommitVerdict.WAITS}
    # The newest intent whose transaction took effect: Kafka may have one that no run lived to record.
    marks = (_parse_our_mark(state, c) for c in before.values() if c is not None)
    newest = max([state.last_mark, *(m.number for m in marks if m is not None)])
    unsettled = {tp for tp, c in before.items() if c is not None and not c.settled}
    going = {k: o for k, o in targets.items() if verdicts[k] is not CommitVerdict.DONE or k.tp in unsettled}
    waiting = tuple(
        CommittedMove(k, _get_offset(before.get(k.tp)), state.frontier(k)) for k in verdicts if k not in targets
    )
    if not targets:
        return CommitResult(CommitStatus.UNCHANGED, (), waiting=waiting)
    others = _put_by_others(state, targets, before)
    # The intent comes first: a mark that is in Kafka always names an entry of the ledger.
    mark, state = _append_intent(ledger, targets)
    post = None
    if outlet:
        from sluice.pipelines.quarantine.dead_letters import build_letters

        post = build_letters(outlet, ledger, state, newest, partitions)
    if going or post:
        # With letters, all partitions get the mark of sent letters, so that moving one offset does not remove it.
        offsets = {k.tp: _attach_mark(state, k, o, mark) for k, o in (targets if post else going).items()}
        answered = _send(member, settings, offsets, post)
        # A commit whose answer was lost may have taken effect: Kafka's offsets tell.
        try:
            _read_back(member, offsets)
        except KafkaUnavailable as e:
            if answered:
                raise
            raise Unknown(
                f"the response to the commit was lost, and the group's offsets cannot be read: {e.message}",
                remedy="nothing is lost: the next run reads them and continues from there",
            ) from e
    _record(ledger, settings, mark, targets, reported=post is None and newest <= state.last_mark)
    status = CommitStatus.COMMITTED if going or post else CommitStatus.UNCHANGED
    moved = tuple(CommittedMove(k, _get_offset(before.get(k.tp)), o) for k, o in targets.items())
    sent, to = (post.taken, post.topic) if post else (0, "")
    return CommitResult(status, moved, mark, sent, to, put_by_others=others, waiting=waiting)


def _put_by_others(state: State, targets: Mapping[Key, int], committed: Committed) -> tuple[CommittedMove, ...]:
    """Returns partitions at the frontier without a commit of Sluice: from the expected offset to the actual one."""

    def strange(key: Key, committed_offset: CommittedOffset) -> bool:
        expected = {_expect_offset(state, key), state.moved.get(key), *state.intents.get(key, ())}
        return (
            committed_offset.offset == targets[key]
            and _parse_our_mark(state, committed_offset) is None
            and committed_offset.offset not in expected
        )

    offsets = ((k, c) for k in targets if (c := committed.get(k.tp)) is not None)
    return tuple(CommittedMove(k, _expect_offset(state, k), c.offset) for k, c in offsets if strange(k, c))


def _compare(
    member: Membership,
    ledger: Ledger,
    settings: CommitSettings,
    cluster: Cluster | None,
    changed: Collection[TopicPartition],
) -> tuple[State, Committed]:
    """Step 3. A refusal must survive a second look: a run that slept in between would compare old with new."""
    for last in (False, True):
        tps = [k.tp for k in ledger.read().frontiers()]
        committed = member.fetch_committed(tps)
        state = ledger.read()
        verdicts = {k: judge(state, k, o, committed.get(k.tp)) for k, o in _choose_targets(state, changed).items()}
        if CommitVerdict.STALE in verdicts.values() and last:
            raise build_lost_error(ledger.feed, state.newest, find_traces(state, committed))
        if CommitVerdict.FOREIGN in verdicts.values() and last:
            raise build_foreign_error(
                ledger, state, find_foreign_marks(state, {k.tp: committed.get(k.tp) for k in verdicts})
            )
        moved = [k for k, v in verdicts.items() if v is CommitVerdict.MOVED]
        if moved and last:
            return _resolve_moved(ledger, settings, moved, state, committed, cluster), committed
        if not {CommitVerdict.MOVED, CommitVerdict.STALE, CommitVerdict.FOREIGN}.intersection(verdicts.values()):
            break
    return state, committed


def judge(state: State, key: Key, target: int, committed: CommittedOffset | None) -> CommitVerdict:
    """Returns whether this partition's committed offset may go from what Kafka holds to `target`."""
    if committed is None:
        return CommitVerdict.GO  # never committed, or expired while idle
    if find_foreign_mark(state, key.tp, committed) is not None:
        return CommitVerdict.FOREIGN
    offset, last = committed.offset, state.commits.get(key)
    mark = _parse_our_mark(state, committed)
    if mark is not None and mark.number >= state.number:
        return CommitVerdict.STALE
    if offset == state.ahead.get(key) and (mark is None or state.lost_entry(mark.number)):
        # Lost entries committed it. The mark of an existing entry is handled below.
        return CommitVerdict.WAITS if offset > target else CommitVerdict.GO
    if offset == target:
        return CommitVerdict.DONE
    if mark is not None and mark.incarnation != key.incarnation:
        return CommitVerdict.GO  # belongs to the topic's earlier life
    if offset == state.moved.get(key):
        return CommitVerdict.GO  # moved by hand, as recorded in the ledger
    if offset == _expect_offset(state, key) and offset < target:
        return CommitVerdict.GO
    ours = mark is not None or offset in state.intents.get(key, ())
    if ours and (last is None or last <= offset) and offset <= target:
        return CommitVerdict.GO
    return CommitVerdict.MOVED


def _parse_our_mark(state: State, committed: CommittedOffset) -> Mark | None:
    mark = Mark.parse(committed.metadata)
    return mark if mark is not None and mark.ledger == state.ledger_id else None


def _resolve_moved(
    ledger: Ledger,
    settings: CommitSettings,
    moved: Sequence[Key],
    state: State,
    committed: Committed,
    cluster: Cluster | None,
) -> State:
    if settings.on_group_moved is OnGroupMoved.OVERWRITE:
        return state
    if settings.on_group_moved is OnGroupMoved.REFUSE or cluster is None:
        raise _build_moved_error(ledger.feed, state, moved, committed, log_ends(cluster, moved) if cluster else {})
    adopt(ledger, moved, committed, cluster, "on_group_moved: adopt")
    return ledger.read()


def explain_moved(
    feed: str,
    policy: OnGroupMoved,
    state: State,
    moved: Sequence[Key],
    committed: Committed,
    log_ends: Mapping[TopicPartition, int],
) -> GroupMoved | None:
    """Returns the error with which the policy refuses these moved offsets; None if it does not."""
    if policy is OnGroupMoved.REFUSE:
        return _build_moved_error(feed, state, moved, committed, log_ends)
    return _explain_beyond(feed, moved, committed, log_ends) if policy is OnGroupMoved.ADOPT else None


def adopt(
    ledger: Ledger, moved: Sequence[Key], committed: Committed, cluster: Cluster, reason: str
) -> tuple[KeyRange, ...]:
    """Record the offsets between the frontier and the group's moved offset as skipped. Returns these ranges.

    Raises GroupMoved for an offset beyond the end of its log: records that do not exist yet cannot be skipped.
    """
    if error := _explain_beyond(ledger.feed, moved, committed, log_ends(cluster, moved)):
        raise error
    return skip_to(ledger, {key: _get_offset(committed.get(key.tp)) or 0 for key in moved}, reason)


def _explain_beyond(
    feed: str, moved: Sequence[Key], committed: Committed, log_ends: Mapping[TopicPartition, int]
) -> GroupMoved | None:
    offsets = {key: _get_offset(committed.get(key.tp)) or 0 for key in moved}
    beyond = [k for k in moved if offsets[k] > log_ends.get(k.tp, 0)]
    if not beyond:
        return None
    details = "; ".join(f"{k}: the group holds {offsets[k]}, the log ends at {log_ends.get(k.tp, 0)}" for k in beyond)
    only = " ".join(f"--only {k}" for k in beyond)
    return GroupMoved(
        f"the group's committed offsets were moved beyond the end of the log, which cannot be adopted; {details}",
        remedy=f"commit the frontier anyway: sluice accept {feed} moved {only} --reason …",
        topic=beyond[0].topic,
        partition=beyond[0].partition,
    )


def log_ends(cluster: Cluster, keys: Iterable[Key]) -> dict[TopicPartition, int]:
    """Returns the ends of these partitions' logs."""
    cluster.forget()
    partitions = cluster.partitions({k.topic for k in keys}, Isolation.READ_UNCOMMITTED)
    return {p.tp: p.high_watermark for p in partitions}


def _append_intent(ledger: Ledger, targets: Mapping[Key, int]) -> tuple[int, State]:
    """Append the intent. Returns its number and the state with it. Its mark covers publications below that number."""
    offsets = tuple(KeyOffset(key=k, offset=o) for k, o in targets.items())
    appended = ledger.append(lambda state: IntentEntry(offsets=offsets))
    if appended is None:
        raise LedgerCorrupt(
            f"the ledger of feed {ledger.feed} took no intent", remedy="this is a bug; nothing was sent"
        )
    return appended.number, appended.state


def _attach_mark(state: State, key: Key, offset: int, mark: int) -> CommittedOffset:
    _, epoch = state.epochs.get(key, (0, -1))
    return CommittedOffset(offset, epoch, Mark(state.ledger_id, mark, key.incarnation).dump())


def _send(
    member: Membership,
    settings: CommitSettings,
    offsets: Mapping[TopicPartition, CommittedOffset],
    post: Letters | None,
) -> bool:
    """Step 4: send the transaction. Returns whether Kafka answered; an unknown outcome is decided by reading back."""
    try:
        if post:
            member.commit_transaction(offsets, post.topic, post)
        elif settings.mode is CommitMode.TRANSACTIONAL:
            member.commit_transaction(offsets)
        else:
            member.commit_plain(offsets)
    except Unknown:
        return False
    return True


def _read_back(member: Membership, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
    answers = member.fetch_committed(list(offsets))
    for tp, meant in offsets.items():
        answer = answers.get(tp)
        if answer is not None and _is_newer(answer, meant):
            raise CommitFenced(
                f"{tp}: another run has committed {answer.offset} since this one set out to commit {meant.offset}",
                remedy="nothing is lost; the next run continues from there",
                topic=tp.topic,
                partition=tp.partition,
            )
        if answer is None or (answer.offset, answer.metadata, answer.settled) != (meant.offset, meant.metadata, True):
            raise CommitFenced(
                f"{tp}: tried to commit {meant.offset}, the group has {_get_offset(answer)}: the commit had no effect",
                remedy="nothing is lost; the next run commits again",
                topic=tp.topic,
                partition=tp.partition,
            )


def _is_newer(answer: CommittedOffset, meant: CommittedOffset) -> bool:
    """Returns whether Kafka has the offset of a later intent of the same ledger."""
    theirs, ours = Mark.parse(answer.metadata), Mark.parse(meant.metadata)
    return theirs is not None and ours is not None and theirs.ledger == ours.ledger and theirs.number > ours.number


def _record(ledger: Ledger, settings: CommitSettings, mark: int, targets: Mapping[Key, int], *, reported: bool) -> None:
    """Step 6: record the commit. `reported`: the ledger knows the newest effective mark, so only offsets can be new."""
    offsets = tuple(KeyOffset(key=k, offset=o) for k, o in targets.items())

    def decide(state: State) -> CommitEntry | None:
        is_recorded = all(state.commits.get(k, -1) >= o and k not in state.moved for k, o in targets.items())
        if is_recorded and (reported or state.last_mark >= mark):
            return None
        return CommitEntry(mode=settings.mode, mark=mark, offsets=offsets)

    ledger.append(decide)


def _get_offset(committed: CommittedOffset | None) -> int | None:
    return None if committed is None else committed.offset


def _build_moved_error(
    feed: str, state: State, moved: Sequence[Key], committed: Committed, log_ends: Mapping[TopicPartition, int]
) -> GroupMoved:
    offsets = {k: _get_offset(committed.get(k.tp)) or 0 for k in moved}

    def line(key: Key) -> str:
        expected, frontier = _expect_offset(state, key), state.frontier(key)
        return f"{key}: the group holds {offsets[key]}, the ledger expects {expected} (frontier {frontier})"

    first = moved[0]
    return GroupMoved(
        "the group's committed offsets were moved; " + "; ".join(map(line, moved)),
        remedy="; ".join(list_remedies(feed, {k: (state.frontier(k), offsets[k]) for k in moved}, log_ends))
        + ". `policies.on_group_moved` in the feed decides it permanently",
        topic=first.topic,
        partition=first.partition,
    )


def list_remedies(feed: str, moved: Mapping[Key, tuple[int, int]], log_ends: Mapping[TopicPartition, int]) -> list[str]:
    """Returns the remedies for moved offsets. `moved` has (frontier, committed offset) of each partition.

    Only an offset ahead of the frontier, and within the log, skips records and can be adopted.
    """
    back = {k: at for k, at in moved.items() if at[1] < at[0]}
    ahead = [k for k, (frontier, offset) in moved.items() if frontier < offset <= log_ends.get(k.tp, offset)]
    accept = f"sluice accept {feed} moved"
    ways = [f"commit the frontier anyway: {accept} --reason …"]
    if ahead:
        only = "".join(f" --only {k}" for k in ahead) if len(ahead) < len(moved) else ""
        where = f" of {', '.join(map(str, ahead))}" if only else ""
        ways.append(
            f"or take over the group's offsets{where}, and record the offsets in between as skipped:"
            f" {accept} --adopt{only} --reason …"
        )
    if back:
        ranges = " ".join(f"--offsets {k}:{offset}-{frontier}" for k, (frontier, offset) in sorted(back.items()))
        ways.append(
            f"offsets that were moved back skip nothing; to land them again: sluice run {feed} {ranges} --replace"
        )
    return ways


def _expect_offset(state: State, key: Key) -> int | None:
    last = state.commits.get(key)
    return last if last is not None else state.origins[key].committed
