"""The wheel of this tree beside verl: nothing that verl uses is changed."""

from __future__ import annotations

import pytest

from support import installed

pytestmark = [pytest.mark.verl, pytest.mark.process]


def test_installing_it_changes_no_package_of_verl(tmp_path):
    (tmp_path / "tree").mkdir()
    wheel = installed.build_wheel(tmp_path / "tree")
    before, after = installed.packages_before_and_after(wheel, tmp_path / "beside")
    for package in ("verl==0.9", "torch==", "transformers==", "tensordict==", "ray=="):
        assert any(line.startswith(package) for line in before), package
    assert installed.without_ours(after) == installed.without_ours(before)
    assert f"onepolicy=={installed.VERSION}" in after
