"""Commands that repair and maintain: accept, repair, unstick, compact, expire, hold, erase, prune."""
