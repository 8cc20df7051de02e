"""The dialects that programs speak, a file each: pure translations to and from messages.py."""
