"""A resume says where it goes on, and from what it began."""

from types import SimpleNamespace

import pytest

from onepolicy.run.resume import _note_resume
from onepolicy.run.run_folder import RunOrigin

PARENT = {"run": "runs/other", "step": 4}


@pytest.mark.parametrize(
    ("origin", "start"),
    [(RunOrigin(), "step 0"), (RunOrigin(4, parent=PARENT), "step 4 of runs/other")],
)
def test_a_run_without_a_checkpoint_starts_again(origin, start, tmp_path):
    (tmp_path / "run.json").write_text('{"parent": null, "id": "0123abcd"}')
    notes = []
    _note_resume(tmp_path, origin, "{}", SimpleNamespace(note=notes.append))
    assert notes == [f"resuming {tmp_path}: it has no checkpoint, so it starts again at {start}"]
