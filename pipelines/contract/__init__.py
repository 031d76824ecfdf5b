"""Contracts: what a feed's rows must be like, as a Great Expectations suite, and what becomes of those that are not.

`suite` reads the file, `catalogue` knows each expectation, `rows` holds rows against them in the tasks (`format` puts
that behind the port `Format`), `whole` holds staged batches against the rest in the driver, `results` says what came
of both.
"""
