"""Spark: the engine that carries tasks out, its executors' side, and Spark as a reader."""
