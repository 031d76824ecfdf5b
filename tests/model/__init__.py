"""The protocol's model, and Sluice's own code in its place.

`protocol_model.py` explored the design (docs/developers/design/model-rules.md). The real ledger, fold, plan, task,
publication, commit, accept, merging, replay and expiry run over ports in memory, and are explored in the same way:

    scheduler.py     actors in threads, one at a time: every effect on a port hands control back
    world.py         the ports: logs, cluster, group coordinator, lake, liveness, engine; what happens by itself
    watch.py         the invariants, after every effect and once faults are over, without Sluice's fold
    programs.py      what actors do, by Sluice's own functions, and how faults heal
    scenarios.py     small worlds, each with the rivals and faults of a rule, and random bigger ones
    explore.py       every schedule with few deviations, or random ones; the shortest trace of a violation
"""
