"""Engines in other processes: one client, a dialect for each kind of server, several as one."""
