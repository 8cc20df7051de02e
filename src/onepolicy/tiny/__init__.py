"""The tiny policy that is made here."""
