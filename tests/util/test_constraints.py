"""Compiled constraints in a forked process (tests/server/test_constraints.py has hostile ones)."""

import os
import signal

import pytest

from ragkv.util import constraints

pytest.importorskip("llguidance", reason="needs the extra structured")


def test_a_process_may_be_forked_while_another_thread_looks_for_a_constraint():
    """The thread that holds the lock does not exist in the child."""
    with constraints._lock:
        if (child := os.fork()) == 0:
            signal.alarm(600)
            os._exit(not constraints.compile_constraint("regex", "[ab]{3}").grammar)
        assert os.waitpid(child, 0)[1] == 0
