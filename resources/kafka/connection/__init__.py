"""Connections to the brokers of one cluster: settings, tokens, sockets, coordinators."""
