"""Small worlds, each with the concurrent runs and faults of a rule in docs/developers/design/model-rules.md, and larger
random ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.model.explore import Scenario
from tests.model.programs import Spec

TWICE: tuple[Spec, ...] = (("catch",), ("catch",))
LANDED: tuple[Spec, ...] = (("catch",),)
A_RECORD: Spec = ("event", "0: a record")
MORE: tuple[Spec, ...] = (("catch",), A_RECORD)
LOST: tuple[Spec, ...] = (*MORE, ("catch",), ("event", "the ledger loses its newest 3"))
REMOVED: tuple[Spec, ...] = (("catch",), ("event", "the lake is removed"), A_RECORD)
NO_NOTE: Spec = ("event", "the note of the newest entry is gone")
RESTORED: tuple[Spec, ...] = (("catch",), ("event", "0: restored at 1"))
SIDE = ("cc", "ct")
"""Two partitions whose offset ranges are read by one task."""
PIECES: tuple[Spec, ...] = (("bf", 0, 0, 1), ("bf", 0, 1, 2))
"""Two small parts in a complete window."""

SKEWED = ((0, 0), (0, 20), (0, 0), (1, 0), (1, 0), (1, 2), (1, 0), (2, 0))
"""The hour in which each record arrives, and by how many its producer's clock is ahead."""


def _make(name: str, actors: tuple[Spec, ...], more: Mapping[str, int] | None = None, **how: Any) -> Scenario:
    return Scenario(name, actors, budgets=more or {"crash": 1}, **how)


SCENARIOS = (
    # -- ledger and publishing
    _make("one run", (("catch",),)),
    _make("two runs", TWICE, {"crash": 1, "append": 1}),
    _make("taken for dead", (("catch",), ("bf", 0, 0, 2)), {"wrongdead": 1, "crash": 1}),
    _make("lost answers", TWICE, {"lost": 1, "arrive": 1, "crash": 1}),
    _make("lost answers and a take-over", (("catch",), ("bf", 0, 0, 2)), {"wrongdead": 1, "lost": 1, "arrive": 1}),
    _make("pieces", (("bf", 0, 0, 1), ("catch",)), logs=("cac", "ct")),
    _make("a hole", (("bf", 0, 1, 2), ("catch",))),
    _make("a dead plan", TWICE, {"wrongdead": 1, "crash": 1}, prelude=(("until", "publish", ("catch",)),)),
    # -- replacement
    _make("again", (("catch",), ("rep", 0, 0, 2))),
    _make("again, slow copies", (("catch",), ("rep", 0, 0, 2)), slow_copies=True),
    _make("again twice", (("rep", 0, 0, 2), ("rep", 0, 1, 2)), {"wrongdead": 1, "crash": 1}, prelude=PIECES),
    _make("again while retention takes", (("rep", 0, 0, 2),), {"retain": 1, "crash": 1}, prelude=LANDED),
    _make("again while compaction takes", (("rep", 0, 0, 2), ("catch",)), {"clean": 1, "crash": 1}, prelude=LANDED),
    _make(
        "the rest again while compaction takes",
        (("rep", 0, 0, 3),),
        {"clean": 1, "crash": 1},
        logs=("ccc",),
        prelude=(("bf", 0, 0, 1),),
    ),
    _make("again and a catch-up", (("rep", 0, 0, 1), ("catch",)), {"append": 1, "crash": 1}, prelude=LANDED),
    # -- a ledger that lost entries
    _make("lost entries", (("ledger",), ("catch",)), prelude=LOST, letters=True, logs=("cbc",)),
    _make("lost entries, accepted twice", (("ledger",), ("ledger",)), prelude=LOST, letters=True, logs=("cbc",)),
    _make("lost entries, no note", (("ledger",), ("catch",)), prelude=(*LOST, NO_NOTE)),
    # -- a removed lake
    _make("the lake is removed", (("catch",), ("group", "committed")), {"append": 1, "crash": 1}, prelude=REMOVED),
    _make("the lake is removed, from the start", (("catch",), ("group", "start")), {"crash": 1}, prelude=REMOVED),
    _make("the lake is removed, taken over twice", (("group", "committed"), ("group", "start")), prelude=REMOVED),
    _make("the lake is removed, letters", TWICE, {"lost": 1}, logs=("cb",), letters=True, prelude=REMOVED),
    # -- losses
    _make("retention", TWICE, {"retain": 1, "crash": 1}),
    _make("retention and a take-over", (("catch",), ("bf", 0, 0, 1)), {"retain": 1, "wrongdead": 1}),
    _make("a loss is accepted", (("catch",), ("lost",)), {"retain": 1, "wrongdead": 1}, on_loss="fail"),
    # -- windows
    _make("windows out of order", (("win", 0), ("win", 2)), {"late": 1, "crash": 1}, hours=4, by_windows=True),
    _make("a window and a catch-up", (("win", 0), ("catch",)), {"append": 1, "tick": 1}, hours=2, by_windows=True),
    _make("the future", (("win", 0), ("win", 1)), {"future": 1, "crash": 1}, hours=3, by_windows=True),
    _make(
        "fast clocks",
        (("win", 1), ("catch",)),
        {"append": 1},
        logs=("c" * 8,),
        stamps=(SKEWED,),
        hours=4,
        by_windows=True,
    ),
    _make(
        "fast clocks, late",
        (("win", 2), ("win", 1)),
        {"late": 1},
        logs=("c" * 8,),
        stamps=(SKEWED,),
        hours=4,
        by_windows=True,
    ),
    _make("late records", (("win", 1), ("catch",)), {"late": 1}, stamps=((0, 1),), hours=3, by_windows=True),
    _make(
        "lagging transactions", (("win", 1), ("catch",)), logs=("ttt",), stamps=((0, 1, 2),), hours=4, by_windows=True
    ),
    _make("open transactions", (("win", 0), ("catch",)), {"open": 1, "end": 1}, hours=2, by_windows=True),
    _make("the open window", (("catch",), ("win", 0)), {"append": 1, "tick": 2}, by_windows=True),
    _make(
        "a partition later", (("win", 1),), {"addpart": 1, "tick": 1}, hours=2, prelude=(("win", 0),), by_windows=True
    ),
    _make("a partition later, caught up", TWICE, {"addpart": 1, "crash": 1}),
    # -- recreated and truncated topics
    _make("recreated", (("catch",), ("accept",)), {"recreate": 1, "append": 1}, prelude=LANDED),
    _make("recreated on the way", (("catch",),), {"recreate": 1, "append": 1, "crash": 1}),
    _make("recreated by windows", (("win", 0), ("accept",)), {"recreate": 1, "crash": 1}, hours=2, by_windows=True),
    _make("recreated, accepted twice", (("accept",), ("accept",)), {"recreate": 2}, prelude=LANDED),
    _make("truncated", (("catch",), ("accept",)), {"trunc": 1, "append": 1}, prelude=LANDED),
    _make("truncated, accepted twice", (("accept",), ("accept",)), {"trunc": 1}, prelude=LANDED),
    _make("truncated on the way", TWICE, {"trunc": 1, "append": 1, "crash": 1}),
    _make("restored from a copy", (("catch",), ("accept",)), {"append": 1, "crash": 1}, prelude=RESTORED),
    # -- a topic that moves to another feed, and back
    _make("moved to another feed", (("catch",), ("move",)), {"append": 1, "crash": 1}, prelude=LANDED),
    _make(
        "moved by windows", (("win", 0), ("move",)), {"append": 1, "crash": 1}, hours=2, by_windows=True, prelude=PIECES
    ),
    _make("moved twice", (("move",), ("move",)), {"append": 1, "crash": 1}, logs=("cc", "ct"), prelude=LANDED),
    _make("moved, answers lost", (("catch",), ("move",)), {"lost": 1, "arrive": 1, "append": 1}, prelude=LANDED),
    # -- committed offsets
    _make("commits", TWICE, {"kick": 1}, logs=("c",), prelude=MORE),
    _make("commits and crashes", TWICE, {"kick": 1, "append": 1, "crash": 1}, prelude=MORE),
    _make("a commit that was not told", TWICE, {"crash": 1}, prelude=(("until", "commit 0:", ("catch",)), A_RECORD)),
    _make("far below the origin", (("bf", 0, 0, 1), ("catch",)), logs=("ccc",), committed=(2,), prelude=LANDED),
    _make("commits, answers lost", TWICE, {"kick": 1, "lost": 1, "append": 1}, logs=("c",), prelude=MORE),
    _make("aborted by the coordinator", TWICE, {"abort": 1, "append": 1, "crash": 1}, logs=("c",), prelude=MORE),
    _make("begun where somebody was", TWICE, {"crash": 1}, logs=("cc", "cc"), committed=(1, None)),
    _make("below the origin", (("catch",), ("bf", 0, 0, 2)), logs=("ccc",), committed=(2,)),
    _make("a stranger", (("catch",), ("ext",)), {"kick": 1, "append": 1}, prelude=LANDED),
    _make("a stranger, answers lost", (("catch",), ("ext",)), {"lost": 1, "crash": 1}, prelude=LANDED),
    _make("offsets expire", TWICE, {"expire": 1, "append": 1, "crash": 1}, prelude=LANDED),
    _make("offsets put by hand", TWICE, {"reset": 1, "append": 1}, prelude=LANDED),
    _make("offsets accepted", (("catch",), ("moved",)), {"reset": 1, "append": 1}, prelude=LANDED),
    _make("offsets adopted", (("catch",), ("moved", True)), {"reset": 1, "append": 1}, prelude=LANDED),
    _make("skipped", (("catch",), ("skip",)), {"append": 1, "wrongdead": 1}),
    # -- dead letters
    _make("letters", TWICE, {"bad": 1, "crash": 1}, logs=("cb",), letters=True),
    _make("letters, answers lost", TWICE, {"lost": 1, "bad": 1}, logs=("b",), letters=True),
    _make(
        "letters alone", (("bf", 0, 0, 2),), {"lost": 1}, logs=("cbc",), committed=(2,), letters=True, prelude=LANDED
    ),
    _make("letters landed again", (("rep", 0, 0, 2), ("catch",)), {"crash": 1, "lost": 1}, logs=("bb",), letters=True),
    _make("letters merged", (("catch",), ("compact",)), logs=("bb",), letters=True, hours=3, prelude=(("win", 0),)),
    # -- compaction, expiry and replay
    _make("merged", (("compact",), ("compact",)), {"wrongdead": 1, "crash": 1}, hours=2, prelude=PIECES),
    _make(
        "merged and landed again",
        (("compact",), ("rep", 0, 0, 1)),
        {"wrongdead": 1, "crash": 1},
        hours=2,
        prelude=PIECES,
    ),
    _make(
        "merged and landed again, slow copies",
        (("compact",), ("rep", 0, 0, 1)),
        hours=2,
        prelude=PIECES,
        slow_copies=True,
    ),
    _make("merged while it is landed", (("compact",), ("catch",)), {"append": 1, "crash": 1}, hours=2, prelude=PIECES),
    _make("merged and expired", (("compact",), ("expire", 1)), {"wrongdead": 1, "crash": 1}, hours=2, prelude=PIECES),
    _make("expired", (("expire", 1), ("catch",)), {"append": 1, "crash": 1}, hours=2, prelude=LANDED),
    _make(
        "expired and landed again",
        (("expire", 1), ("rep", 0, 0, 2)),
        {"lost": 1, "arrive": 1, "crash": 1},
        hours=2,
        prelude=LANDED,
    ),
    _make("replayed", (("replay",), ("replay",)), {"wrongdead": 1, "crash": 1}, logs=("cb",), hours=2, prelude=LANDED),
    _make("replayed and merged", (("replay",), ("compact",)), logs=("cb",), hours=2, prelude=PIECES),
    _make(
        "replayed and landed again",
        (("replay",), ("rep", 0, 0, 2)),
        {"wrongdead": 1, "crash": 1},
        logs=("cb",),
        hours=2,
        prelude=LANDED,
    ),
    _make(
        "replayed and sent",
        (("replay",), ("catch",)),
        {"lost": 1, "crash": 1},
        logs=("cb",),
        letters=True,
        prelude=(("land",),),
    ),
    # -- erasure
    _make("erased", (("erase", 0, 0, 1), ("catch",)), {"append": 1, "crash": 1}, hours=2, prelude=LANDED),
    _make("erased twice", (("erase", 0, 0, 1), ("erase", 0, 1, 2)), {"wrongdead": 1, "crash": 1}, prelude=LANDED),
    _make("erased, answers lost", (("erase", 0, 0, 1),), {"lost": 1, "arrive": 1, "crash": 1}, prelude=LANDED),
    _make(
        "erased and landed again", (("erase", 0, 0, 1), ("rep", 0, 0, 2)), {"wrongdead": 1, "crash": 1}, prelude=LANDED
    ),
    _make(
        "erased and landed again, slow copies",
        (("erase", 0, 0, 1), ("rep", 0, 0, 2)),
        prelude=LANDED,
        slow_copies=True,
    ),
    _make(
        "erased, and landed again while compaction takes",
        (("rep", 0, 0, 2),),
        {"clean": 1, "crash": 1},
        prelude=(*LANDED, ("erase", 0, 0, 1)),
    ),
    _make(
        "erased and replayed",
        (("erase", 0, 1, 2), ("replay",)),
        {"wrongdead": 1, "crash": 1},
        logs=("cb",),
        hours=2,
        prelude=LANDED,
    ),
    _make(
        "replayed, then erased",
        (("erase", 0, 1, 2),),
        logs=("cbb",),
        hours=2,
        prelude=(*LANDED, ("replay",)),
    ),
    _make(
        "erased and merged", (("erase", 0, 0, 1), ("compact",)), {"wrongdead": 1, "crash": 1}, hours=2, prelude=PIECES
    ),
    _make(
        "erased and expired", (("erase", 0, 0, 1), ("expire", 1)), {"wrongdead": 1, "crash": 1}, hours=2, prelude=LANDED
    ),
    _make(
        "expired, and landed again without the erased",
        (("expire", 1), ("rep", 0, 0, 2)),
        hours=2,
        prelude=(*LANDED, ("erase", 0, 0, 1)),
    ),
    _make("erased and audited", (("erase", 0, 0, 1), ("audit",)), hours=2, prelude=(*LANDED, ("audit",))),
    _make("side by side, erased", (("erase", 0, 0, 1), ("rep", 1, 0, 2)), logs=SIDE, shared=True, prelude=LANDED),
    # -- holds
    _make("on hold and expired", (("hold",), ("expire", 1)), {"crash": 1, "lost": 1}, hours=2, prelude=LANDED),
    _make("on hold and erased", (("hold",), ("erase", 0, 0, 1)), {"crash": 1, "lost": 1}, hours=2, prelude=LANDED),
    # -- audits, and packing of old entries
    _make("audited and merged", (("audit",), ("compact",)), {"crash": 1}, hours=2, prelude=(*PIECES, ("audit",))),
    _make("audited and expired", (("expire", 1), ("audit",)), hours=2, prelude=(*LANDED, ("audit",))),
    _make(
        "audited, and entries are lost", (("audit",), ("ledger",)), prelude=(*MORE, ("catch",), ("audit",), *LOST[-1:])
    ),
    _make("packed twice", (("pack",), ("pack",)), hours=4, prelude=(*PIECES, A_RECORD, ("catch",))),
    _make(
        "packed while it lands", (("pack",), ("catch",)), {"append": 1, "lost": 1}, hours=4, prelude=(*PIECES, *MORE)
    ),
    # -- offset ranges that share a file
    _make("side by side", TWICE, {"append": 1, "crash": 1}, logs=SIDE, shared=True),
    _make("side by side, lost answers", TWICE, {"lost": 1, "crash": 1}, logs=SIDE, shared=True),
    _make("side by side, taken for dead", TWICE, {"wrongdead": 1, "crash": 1}, logs=SIDE, shared=True),
    _make("side by side, one lost", TWICE, {"retain": 1, "wrongdead": 1, "crash": 1}, logs=SIDE, shared=True),
    _make("side by side, one truncated", TWICE, {"trunc": 1, "crash": 1}, logs=SIDE, shared=True),
    _make(
        "side by side, recreated", (("catch",), ("accept",)), {"recreate": 1}, logs=SIDE, shared=True, prelude=LANDED
    ),
    _make("side by side, pieces", (("bf", 0, 0, 1), ("catch",)), logs=SIDE, shared=True),
    _make("side by side, again", (("catch",), ("rep", 1, 0, 1)), logs=SIDE, shared=True, prelude=LANDED),
    _make(
        "side by side, again twice",
        (("rep", 0, 0, 2), ("rep", 1, 1, 2)),
        {"wrongdead": 1, "crash": 1},
        logs=SIDE,
        shared=True,
        prelude=LANDED,
    ),
    _make(
        "side by side, again while retention takes",
        (("rep", 0, 0, 2), ("catch",)),
        {"retain": 1, "crash": 1},
        logs=SIDE,
        shared=True,
        prelude=LANDED,
    ),
    _make(
        "side by side, one truncated, again",
        (("accept",), ("rep", 0, 0, 2)),
        {"trunc": 1, "crash": 1},
        logs=SIDE,
        shared=True,
        prelude=LANDED,
    ),
    _make(
        "side by side, again, slow copies",
        (("rep", 0, 0, 2), ("catch",)),
        {"append": 1, "crash": 1},
        logs=SIDE,
        shared=True,
        prelude=(("land",),),
        slow_copies=True,
    ),
    _make("side by side, merged", (("compact",), ("catch",)), logs=SIDE, hours=2, shared=True, prelude=PIECES),
    _make("side by side, expired", (("expire", 1), ("rep", 0, 0, 2)), logs=SIDE, hours=2, shared=True, prelude=LANDED),
    _make(
        "side by side, replayed",
        (("replay",), ("replay",)),
        {"wrongdead": 1, "crash": 1},
        logs=("cb", "bc"),
        hours=2,
        shared=True,
        prelude=LANDED,
    ),
    _make(
        "side by side, replayed and landed again",
        (("replay",), ("rep", 1, 0, 2)),
        {"wrongdead": 1, "crash": 1},
        logs=("cb", "cc"),
        hours=2,
        shared=True,
        prelude=LANDED,
    ),
    _make(
        "side by side, replayed and sent",
        (("replay",), ("catch",)),
        {"lost": 1, "crash": 1},
        logs=("cb", "b"),
        letters=True,
        shared=True,
        prelude=(("land",),),
    ),
    _make("side by side, lost entries", (("ledger",), ("catch",)), logs=SIDE, prelude=LOST, shared=True),
)
_OF_OUTPUTS = (
    "two runs",
    "lost answers and a take-over",
    "taken for dead",
    "again, slow copies",
    "again twice",
    "again while compaction takes",
    "lost entries",
    "replayed",
    "replayed and merged",
    "side by side, lost answers",
    "side by side, again while retention takes",
    "side by side, merged",
    "side by side, replayed and landed again",
    "side by side, replayed and sent",
)
BY_NAME = {s.name: s for s in SCENARIOS}
SCENARIOS = (
    *SCENARIOS,
    *(replace(BY_NAME[name], name=f"outputs, {name}", outputs=True) for name in _OF_OUTPUTS),
)
BY_NAME = {s.name: s for s in SCENARIOS}


def make_random_scenario(seed: int) -> Scenario:
    """Return a scenario of two to four runs of any kind on one or two partitions, with random faults."""
    chance = random.Random(seed)
    count = chance.choice((1, 1, 2))
    logs = tuple("".join(chance.choice("cccbat") for _ in range(chance.randint(1, 4))) for _ in range(count))
    stamps = tuple(tuple(sorted(chance.choice((0, 0, 1, 2)) for _ in log)) for log in logs)
    by_windows = chance.random() < 0.5
    letters = chance.random() < 0.3
    actors = tuple(_choose_actor(chance, count) for _ in range(chance.randint(2, 4)))
    faults = (
        "append",
        "late",
        "future",
        "open",
        "end",
        "tick",
        "retain",
        "clean",
        "addpart",
        "lost",
        "arrive",
        "kick",
        "abort",
    )
    budgets = {b: chance.choice((1, 1, 2)) for b in (*faults, "crash", "wrongdead") if chance.random() < 0.5}
    if chance.random() < 0.3:
        budgets[chance.choice(("recreate", "trunc"))] = 1
    if not letters and chance.random() < 0.3:
        budgets[chance.choice(("expire", "reset"))] = 1
        actors += (("ext",),) if chance.random() < 0.3 else ()
    return Scenario(
        f"random {seed}",
        actors,
        logs,
        stamps,
        tuple(chance.choice((None, None, 0, 1)) for _ in logs),
        chance.choice((1, 2, 4)),
        chance.choice(((), LANDED, LANDED, (("bf", 0, 0, 1),))),
        budgets,
        chance.choice(("accept", "accept", "fail")),
        chance.choice(("earliest", "earliest", "latest")),
        letters,
        by_windows,
        chance.random() < 0.2,
        chance.choice(("window", "window", "record_time")),
        chance.random() < 0.4,
        chance.random() < 0.3,
    )


def _choose_actor(chance: random.Random, partitions: int) -> Spec:
    where, start = chance.randrange(partitions), chance.randint(0, 1)
    return chance.choice(
        (
            ("catch",),
            ("catch",),
            ("land",),
            ("win", chance.randint(0, 2)),
            ("bf", where, start, start + 1),
            ("rep", where, start, start + 1),
            ("compact",),
            ("replay",),
            ("expire", chance.randint(1, 2)),
            ("erase", where, start, start + 1),
            ("accept",),
            ("lost",),
            ("skip",),
        )
    )
