"""Views that several commands share."""
