"""On-policy numerics: operators whose result for a row does not depend on the rest of the batch.

With them, engine and trainer compute the same bits.
"""
