"""ZooKeeper, where Kafka's old consumers keep their group: who is in it, who owns what, and how far it has come."""
