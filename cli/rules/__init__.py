"""Commands on rules for data: feeds, contract, quarantine, schema."""
