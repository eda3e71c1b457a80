"""The attacks that tests/RELIABILITY.md counts are there."""

import ast

from tests.reliability import ids
from tests.support import REPO


def test_each_named_attack_is_a_test_of_its_file():
    named = {test for tests in ids().values() for test in tests}
    files = {file: ast.parse((REPO / "tests" / file).read_text()).body for file, _ in named}
    there = {(file, node.name) for file, body in files.items() for node in body if isinstance(node, ast.FunctionDef)}
    assert named - there == set()
