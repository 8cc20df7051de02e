"""Blocks of rows that a child sends: the parent takes none whose columns do not fit each other."""

import numpy as np
import pytest

from onepolicy.record.schema import LENGTHS, RaggedColumn, RawBlock


def block(**changes):
    """Return a block of three rows with 2, 0 and 1 tokens, and its message with some changes."""
    columns = {
        "step": RaggedColumn(np.array([4, 4, 5]), None),
        "logp_rollout": RaggedColumn(np.array([-1.0, -2.0, -3.0]), np.array([2, 0, 1])),
    }
    made = RawBlock(7, columns, 0.25, "verl")
    message = made.message()
    return made, message._replace(arrays=message.arrays | changes)


def test_a_block_comes_back_as_it_was_sent():
    made, message = block()
    found = RawBlock.from_message(message)
    assert (found.first_row, found.done, found.framework) == (7, 0.25, "verl")
    assert list(found.columns) == list(made.columns)
    for name, column in made.columns.items():
        assert found.columns[name].values.tolist() == column.values.tolist()
    assert found.columns["step"].lengths is None
    assert found.columns["logp_rollout"].lengths.tolist() == [2, 0, 1]


def test_columns_that_do_not_fit_each_other_are_not_taken(subtests):
    for name, values in (
        ("step", np.array([4, 4])),
        ("step", np.array([4, 4, 5, 5])),
        (f"logp_rollout{LENGTHS}", np.array([2, 1])),
        (f"logp_rollout{LENGTHS}", np.array([2, 0, 2])),
        (f"logp_rollout{LENGTHS}", np.array([3, -1, 1])),
        (f"logp_rollout{LENGTHS}", np.array([2.0, 0.0, 1.0])),
    ):
        with subtests.test(name, values=values), pytest.raises(AssertionError):
            RawBlock.from_message(block(**{name: values})[1])
