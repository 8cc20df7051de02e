"""Clients of engines in other processes: HTTP, replies, tokens and start-up checks."""
