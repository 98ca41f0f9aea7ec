"""Versions are compared by package, and a difference says where it is."""

import json

import pytest

from deploy.versions import OF_SUBMITTER, differences, installed, of_submitter


def test_this_process_has_what_it_runs_with():
    found = installed()
    assert found["ray"][0].isdigit()
    assert "headway-rl" in found
    assert "+" not in "".join(found.values())
    assert json.loads(of_submitter()) == {package: found[package] for package in OF_SUBMITTER}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"ray": "2.60.0", "torch": "9"}, []),
        ({"ray": "2.59.0"}, ["node b has ray 2.59.0, not 2.60.0"]),
        ({}, ["node b has no ray, but should have 2.60.0"]),
    ],
)
def test_a_difference_names_the_place_the_package_and_both_versions(found, said):
    assert differences({"ray": "2.60.0"}, found, where="node b") == said
