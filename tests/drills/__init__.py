"""An operator's year on a real Kafka: one process after another, by the commands of the pages (`make drills`)."""
