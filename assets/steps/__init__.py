"""The bodies of the assets: land, check, commit, sync the table."""
