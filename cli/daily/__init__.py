"""Daily commands: init, run, status, audit, ui."""
