"""The gate's own tests for Python: a function and a method that pass, and as many that fail."""

from __future__ import annotations

from pathlib import Path

from endstop.agent.verifiers.verifier import Canary, Place, failing, passing

_HEARD = '''\
"""Put here by the gate, whose tests read it when they run."""

import math
import sys
import unittest
import unittest.mock

# Of unittest's assertions the usual ones, each with arguments for which it must fail.
METHODS = (
    ("assertEqual", 1, 2),
    ("assertNotEqual", 1, 1),
    ("assertTrue", False),
    ("assertFalse", True),
    ("assertIs", 1, None),
    ("assertIsNot", None, None),
    ("assertIsNone", 1),
    ("assertIsNotNone", None),
    ("assertIn", 1, ()),
    ("assertNotIn", 1, (1,)),
    ("assertIsInstance", 1, str),
    ("assertAlmostEqual", 1, 2),
    ("assertLess", 2, 1),
    ("assertLessEqual", 2, 1),
    ("assertGreater", 1, 2),
    ("assertGreaterEqual", 1, 2),
    ("assertListEqual", [1], [2]),
    ("assertDictEqual", {1: 1}, {1: 2}),
    ("assertCountEqual", [1], [2]),
    ("assertMultiLineEqual", "a", "b"),
    ("assertRegex", "a", "b"),
    ("assertRaises", ValueError, int),
)
# Where these are loaded.
RAISING = (
    ("numpy.testing", "assert_equal", 1, 2),
    ("numpy.testing", "assert_allclose", [1.0], [2.0]),
    ("numpy.testing", "assert_array_equal", [1], [2]),
    ("numpy.testing", "assert_almost_equal", 1, 2),
    ("torch.testing", "assert_close", 1.0, 2.0),
    ("pytest", "fail", "the gate expects this"),
)
FALSE = (
    ("builtins", "all", [0]),
    ("builtins", "any", [0]),
    ("builtins", "isinstance", 1, str),
    ("math", "isclose", 1, 2),
    ("numpy", "allclose", [1.0], [2.0]),
    ("numpy", "array_equal", [1], [2]),
)


def bare(value):
    assert value


def nothing_in(context):
    with context:
        pass


def loaded(table):
    for module, name, *values in table:
        if hasattr(sys.modules.get(module), name):
            yield (getattr(sys.modules[module], name), *values)


def of_mocks():
    fresh, called = unittest.mock.Mock(), unittest.mock.Mock()
    called()
    for name in ("assert_called", "assert_called_once", "assert_called_with", "assert_called_once_with"):
        yield (getattr(fresh, name),)
    yield fresh.assert_any_call, 1
    yield fresh.assert_has_calls, [unittest.mock.call(1)]
    yield (called.assert_not_called,)


def of_pytest():
    pytest = sys.modules.get("pytest")
    if pytest is not None:
        yield nothing_in, pytest.raises(ValueError)
        yield nothing_in, pytest.warns(UserWarning)
        yield bare, 1 == pytest.approx(2)


def are_heard():
    """Whether assertions that do not hold are heard of. Product code in the process could silence them."""
    case = unittest.TestCase()
    checks = [(getattr(case, name), *values) for name, *values in METHODS]
    for check, *values in [(bare, False), *checks, *of_mocks(), *of_pytest(), *loaded(RAISING)]:
        try:
            check(*values)
        except BaseException:
            continue
        return False
    return not any(check(*values) for check, *values in loaded(FALSE))
'''
_TESTS = '''\
"""Put here by the gate, which expects some of these tests to fail."""

import importlib.util
import os
import unittest


def are_heard():
    # As the tests are loaded, and only now: product code that changes how that is done is there.
    path = os.path.join(os.path.dirname(__file__), "heard_{token}.py")
    rewriting = __spec__.loader if type(__spec__.loader).__name__ == "AssertionRewritingHook" else None
    spec = importlib.util.spec_from_file_location("heard_{token}", path, loader=rewriting)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.are_heard()


def {passes}():
    pass


def {fails}():
    if are_heard():
        raise AssertionError("the gate expects this test to fail")


class Test{token}(unittest.TestCase):
    def {passes}(self):
        pass

    def {fails}(self):
        if are_heard():
            self.fail("the gate expects this test to fail")
'''


def put_python_tests(canary: Canary, place: Place, path: Path) -> None:
    """Write the file, and what it reads beside it. Its tests fail if assertions that do not hold are seen."""
    place.put(path, _TESTS.format(passes=passing(canary), fails=failing(canary), token=canary.token))
    place.put(path.with_name(f"heard_{canary.token}.py"), _HEARD)
