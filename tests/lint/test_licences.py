"""docs/data/licences.csv lists what is installed, under the licence of its metadata."""

import re
from importlib.metadata import PathDistribution

import pytest

from support.licences import (
    CLASSIFIER,
    PAGE,
    is_permissive,
    licence_of,
    listed_packages,
    part,
    rows,
)

LISTED = {row.name: (row.licence, row.brought_by) for row in listed_packages()}


def test_every_package_that_an_install_brings_is_listed_as_it_is():
    """What another platform brings in addition may be missing here."""
    found = {row.name: (row.licence, row.brought_by) for row in rows()}
    assert {"torch", "transformers", "plotly", "pyarrow", "peft", "ray", "wandb"} <= set(found)
    command = "PYTHONPATH=src:tests .venv/bin/python -m support.licences"
    assert {name: LISTED.get(name) for name in found} == found, f"write it anew: {command}"
    assert PAGE.read_text(encoding="utf-8").endswith(part(listed_packages())), (
        f"write it anew: {command}"
    )


def test_no_package_has_an_unknown_or_a_strong_copyleft_licence():
    for name, (licence, _) in LISTED.items():
        assert licence != "see the package", name
        assert not re.search(r"\bA?GPL", licence.replace("LGPL", "")), name


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT OR Apache-2.0\nLicense: BSD", "MIT OR Apache-2.0"),
        (f"Classifier: {CLASSIFIER}Apache Software License", "Apache-2.0"),
        (f"License: BSD 3-Clause\nClassifier: {CLASSIFIER}BSD License", "BSD-3-Clause"),
        (f"License: see below\nClassifier: {CLASSIFIER}MIT License", "MIT"),
        ("Summary: nothing", "see the package"),
    ],
)
def test_a_licence_is_read_from_the_metadata(metadata, licence, tmp_path):
    folder = tmp_path / "some-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: some\nVersion: 1.0\n{metadata}\n"
    )
    assert licence_of(PathDistribution(folder)) == licence


def test_which_licences_are_read_first():
    assert is_permissive("Apache-2.0 OR BSD-2-Clause")
    assert is_permissive("(MIT AND Zlib)")
    assert not is_permissive("MPL-2.0 AND MIT")
    assert not is_permissive("see the package")
