"""The dialect of each kind of server."""
