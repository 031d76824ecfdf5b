"""Sluice lands Kafka topics in a Parquet lake, batch by batch, and can prove that it lost nothing."""
