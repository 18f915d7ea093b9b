"""A test far over its budget fails the suite; a slow machine does not."""

from types import SimpleNamespace

import pytest
from budgets import BUDGET, ON_RANKS, SUITE, Report

OTHERS = SUITE - 130
"""Processor time of all other tests [s], with which the suite takes 2400 s on ordinary machines."""


def report_of(held: str | None, slowness: float, **seconds: float) -> Report:
    """The report on tests of 100 and 30 s, or others, on a machine that is slower by some factor.

    "others" is one job of ranks; its budget is the sum of its tests' budgets.
    """
    report = Report(held)
    taken = {"big": 100.0, "usual": 30.0, "others": OTHERS} | seconds
    for name, value in taken.items():
        properties = {"seconds": slowness * value, "budget": 50.0}
        if name == "others":
            properties |= {"on ranks": {"a": slowness * 45.0}, "ranks": 2, "long": False}
        report.pytest_runtest_logreport(
            SimpleNamespace(when="teardown", nodeid=name, user_properties=[*properties.items()])
        )
    return report


@pytest.mark.parametrize("slowness", [0.5, 1.0, 10.0])
def test_no_machine_fails_for_being_slow(slowness):
    assert not report_of("share", slowness).failures()
    far_over = report_of("share", slowness, big=400.0).failures()
    assert [line.partition(":")[0] for line in far_over] == ["big"]


def test_each_test_is_held_to_its_own_budget():
    message = [
        "big: 100 s, its budget is 50 s",
        f"a on 2 rank(s): 45 s, its budget is {ON_RANKS:.0f} s",
    ]
    assert list(report_of(None, 1.0).over()) == message
    assert report_of("seconds", 1.0).failures() == message
    assert not report_of(None, 1.0).failures()


def test_a_few_tests_alone_are_held_to_three_times_their_budget():
    report = Report("share")
    for name, seconds in (("slow", 3.1 * BUDGET), ("usual", 2.9 * BUDGET)):
        properties = {"seconds": seconds, "budget": BUDGET}
        report.pytest_runtest_logreport(
            SimpleNamespace(when="teardown", nodeid=name, user_properties=[*properties.items()])
        )
    assert [line.partition(":")[0] for line in report.failures()] == ["slow"]
