"""`onepolicy engine check`: is this engine fit for a run?"""
