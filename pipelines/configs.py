"""Settings of Kafka's that say how long things last, as far as a cluster tells. What it does not tell is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """What a topic keeps: `retention_ms` and `retention_bytes` (of each partition), None for no end.

    `deletes` and `compacts` are its cleanup.policy; without `deletes` neither bound means anything.
    """

    retention_ms: int | None = None
    retention_bytes: int | None = None
    deletes: bool = True
    compacts: bool = False


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """In ms; None: the cluster does not tell, or there is no such bound.

    `offsets_retention`: how long an empty group's offsets last (offsets.retention.minutes);
    `transactional_id_expiration`: how long an unused transactional id lasts (transactional.id.expiration.ms);
    `transaction_max_timeout`: how long a transaction may stay open (transaction.max.timeout.ms).
    """

    offsets_retention: int | None = None
    transactional_id_expiration: int | None = None
    transaction_max_timeout: int | None = None


@dataclass(frozen=True, slots=True)
class Configs:
    """Topics whose settings the client may not see are left out; of these, `denied` are refused by name."""

    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    broker: BrokerConfig = BrokerConfig()
    denied: tuple[str, ...] = ()
