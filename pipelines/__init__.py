"""The stages of a batch and their vocabulary: pure functions and frozen values over small ports."""
