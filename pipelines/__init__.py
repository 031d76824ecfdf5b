"""The stages of a batch and their model: pure functions and frozen values over small ports."""
