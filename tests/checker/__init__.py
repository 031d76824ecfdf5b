"""An independent checker: it decides invariants 1 to 14 and 16 of docs/developers/design/invariants.md from outside.

It reads producers' logs, the output of Kafka's own tools about the topics, log segments and `__consumer_offsets`, the
ledger's files and the Parquet files. It imports nothing of Sluice's reading path.

    python -m tests.checker --lake .sluice/lake --feed orders --bootstrap 127.0.0.1:9092 \\
        --log-dirs .sluice/kafka/node-1/data --produced producer-1.jsonl --healed

`facts` is the evidence as plain data, `tools` gathers it from Kafka, `ledger` folds the entries, `lake` reads the
files, `invariants` decides.
"""
