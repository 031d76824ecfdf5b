"""The fault suite: three real brokers, producers that never stop, and one fault after another.

    make faults            each fault alone, with a fixed seed (SEED=2 for another)
    make long-tests MINUTES=30   random combinations of faults

`arena` is the cluster, which Sluice reaches through proxies; `field` a feed with its topic, producers, runs and the
checker's verdict; `nemeses` the faults; `points` the places where a run can be killed; `account` the report.
"""
