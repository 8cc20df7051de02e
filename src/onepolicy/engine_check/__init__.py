"""`onepolicy engine check`: checks of a rollout engine against its trainer."""
