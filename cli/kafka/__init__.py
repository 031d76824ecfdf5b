"""Commands on Kafka: offsets, groups, ACLs, republish, the local broker, sample events."""
