"""The endurance scene of `make soak MINUTES=…`: a deployment of 24 feeds that must stay correct and flat for a day.

Three brokers behind proxies, a store and a registry behind proxies, Dagster by the units of infra/systemd on PostgreSQL
(even seeds: SQLite), and a second scheduler. Producers write all the time. Faults, upkeep and readers take turns by the
seed. Between two rounds of faults everything is healed, and the checker judges some feeds; at the end it judges all.

`feeds` are the feeds and their records, `writers` the producers, `site` the systems, `commands` runs of `sluice`,
`faults` all that goes wrong, `upkeep` an operator's commands, `readers` queries with filters, `verdicts` the checker,
`samples` a line of measurements a minute, `judgement` their slopes and the plot, `journal` the folder of all this.
"""
