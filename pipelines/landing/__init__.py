"""One task: fetch, decode, write staged parts; and prove them from their files."""
