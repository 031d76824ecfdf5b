"""The model of the protocol, and the same exploration of Sluice's own code.

`protocol_model.py` explored the design (docs/developers/design/model-rules.md). The real ledger, fold, plan, task,
publication, commit, accept, compaction, replay and expiry run on ports in memory, and are explored in the same way:

    scheduler.py     actors in threads, one at a time: each effect on a port returns control to the scheduler
    world.py         the ports (logs, cluster, group coordinator, lake, liveness, engine) and their own events
    watch.py         checks of the invariants, after each effect and at the end, without Sluice's fold
    programs.py      the programs of actors, which call Sluice's own functions, and the healing of faults
    scenarios.py     small worlds, each with the concurrent runs and faults of a rule, and larger random ones
    explore.py       all schedules with few deviations, or random ones; the shortest trace of a violation
"""
