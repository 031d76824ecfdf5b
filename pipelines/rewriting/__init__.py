"""Landed parts written anew: merged, replayed from quarantine, or retired."""
