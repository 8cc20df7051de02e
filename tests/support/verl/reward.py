"""The reward of a whole run, which verl loads from this file."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of letters from the first half of the alphabet."""
    return sum(letter < "n" for letter in solution_str) / max(1, len(solution_str))
