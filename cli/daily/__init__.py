"""Daily commands: init, run, status, check, audit, ui."""
