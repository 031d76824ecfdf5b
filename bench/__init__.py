"""How fast Sluice is, side by side with the usual ways; every landing is checked before its time counts."""
