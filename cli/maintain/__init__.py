"""Commands that repair and maintain: accept, repair, unstick, compact, expire, erase, prune."""
