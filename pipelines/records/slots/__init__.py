"""Slots that compiled loops fill, and the base of the binary formats Avro and Protobuf."""
