"""The wheel of this tree beside TRL: nothing that TRL uses is changed."""

from __future__ import annotations

import pytest

from support import installed

pytestmark = [pytest.mark.trl, pytest.mark.process]


def test_installing_it_changes_no_package_of_trl(tmp_path):
    (tmp_path / "tree").mkdir()
    wheel = installed.build_wheel(tmp_path / "tree")
    before, after = installed.packages_before_and_after(wheel, tmp_path / "beside")
    assert any(line.startswith("trl==1.16") for line in before)
    assert installed.without_ours(after) == installed.without_ours(before)
    assert f"onepolicy=={installed.VERSION}" in after
