"""Jobs beyond landing: compaction, republish, reports, runs over many feeds."""
