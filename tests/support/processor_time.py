"""Processor time, which unlike the clock hardly depends on what else the machine does."""

import os


def processor_time() -> float:
    """User and system time [s] of this process and of those it has started that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
