"""Where every offset went: audit, rescan against Kafka, and one record explained."""
