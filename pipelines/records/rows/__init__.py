"""The columns of landed rows, and the protocols by which every format makes them."""
