"""ZooKeeper, where Kafka's old consumers keep their group: members, owners of partitions, and offsets."""
