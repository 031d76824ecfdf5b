"""The fault suite: three real brokers, producers that never stop, and one thing after the other that goes wrong.

    make faults            each fault by itself, with a fixed seed (SEED=2 for another)
    make long-tests MINUTES=30   random combinations of them, for so long

`arena` is the cluster, which Sluice reaches through proxies; `field` a feed with its topic and producers, the runs over
it, and the checker's verdict; `nemeses` what goes wrong; `points` where a run can be killed; `account` what is told.
"""
