"""Environments of other packages, played in our episodes.

Each package is imported when its kind of task is built.
"""
