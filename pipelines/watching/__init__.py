"""How a feed stands: its windows, lag, what retention threatens, and how long runs take."""
