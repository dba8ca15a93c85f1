"""`python -m unittest` with a JUnit report. Runs in the project's process, on any Python from 3.8.

ENDSTOP_REPORT names the report; ENDSTOP_CANARY the file of the gate's tests: one that passes, one that fails.
"""

# mypy: ignore-errors

import os
import sys

# All that is needed is loaded before the project's directory comes first, where a module may have any name.
if __name__ == "__main__":
    sys.path.pop(0)

import importlib.util
import unittest
import unittest.mock
from xml.sax.saxutils import quoteattr

REPORT = os.environ.pop("ENDSTOP_REPORT", "")
CANARY = os.environ.pop("ENDSTOP_CANARY", "")
START = os.getcwd()


class Result(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told = []

    def tell(self, test, status):
        self.told.append((test, status))

    def addSuccess(self, test):
        super().addSuccess(test)
        self.tell(test, "passed")

    def addError(self, test, err):
        super().addError(test, err)
        self.tell(test, "failed")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.tell(test, "failed")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.tell(test, "failed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.tell(test, "skipped")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.tell(test, "skipped")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.tell(test, "failed")


class Runner(unittest.TextTestRunner):
    resultclass = Result

    def run(self, test):
        if CANARY:
            self.failfast = False
            # A test that raises it counts as passed; unittest itself does so only to fail fast.
            unittest.case._ShouldStop = ()
            test = unittest.TestSuite([test, canary()])
        result = super().run(test)
        write(result.told)
        return result


def canary():
    # Read now: product code that changes how tests are loaded is there.
    spec = importlib.util.spec_from_file_location(os.path.basename(CANARY)[:-3], CANARY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return unittest.TestLoader().loadTestsFromModule(module)


def write(told):
    lines = ["<testsuite>"]
    for test, status in told:
        classname, _, name = test.id().rpartition(".")
        module = sys.modules.get(type(test).__module__)
        path = getattr(module, "__file__", None) or ""
        if type(test).__module__.startswith("unittest."):
            # A stand-in for what could not be loaded or set up.
            classname, path, name = "", "", test.id()
        relative = os.path.relpath(path, START) if path else ""
        where = "" if relative.startswith("..") or not relative else " file=" + attribute(relative)
        lines.append(
            "<testcase classname={}{} name={}>{}</testcase>".format(
                attribute(classname),
                where,
                attribute(name),
                {"passed": "", "failed": "<failure/>", "skipped": "<skipped/>"}[status],
            )
        )
    lines.append("</testsuite>")
    # A command may start several runs one after another.
    path, number = REPORT, 0
    while os.path.lexists(path):
        number += 1
        path = f"{REPORT}.{number}"
    with open(path, "w", encoding="utf-8") as report:
        report.write("\n".join(lines))


def attribute(text):
    return quoteattr("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


if __name__ == "__main__":
    sys.path.insert(0, START)
    sys.argv[0] = "python -m unittest"
    unittest.main(module=None, testRunner=Runner)
