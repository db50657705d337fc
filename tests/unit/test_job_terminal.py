# SPDX-License-Identifier: Apache-2.0
"""A job's own terminal (infiniswap/device/jobs/terminal.py), without the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from support.jobs.runs import Terminal

SETS_ITS_OWN_MEANWHILE = """
import os, termios
from infiniswap.device.jobs.terminal import open_terminal

terminal = open_terminal(os.getuid())
job = os.dup(terminal.standard_streams()[0])
look = termios.tcgetattr

was_set = []

def leave_line_mode():
    was_set.append(True)
    own = look(job)
    own[3] &= ~termios.ICANON
    termios.tcsetattr(job, termios.TCSANOW, own)

def look_before_the_job_sets_it(fd):
    attributes = look(fd)
    if fd == terminal._primary and not was_set:
        leave_line_mode()
    return attributes

termios.tcgetattr = look_before_the_job_sets_it
terminal.started()
if not was_set:
    leave_line_mode()
is_line_mode = bool(look(job)[3] & termios.ICANON)
has_keyboard = terminal._has_keyboard
terminal.close()
print("has the keyboard:", has_keyboard, "is in line mode:", is_line_mode)
"""


@pytest.fixture
def window() -> Iterator[Terminal]:
    window = Terminal([sys.executable, "-c", SETS_ITS_OWN_MEANWHILE], os.environ)
    yield window
    window.close()


def test_a_job_that_sets_its_terminal_at_once_keeps_it_so(window: Terminal) -> None:
    """In between the look at the terminal and what is done then."""
    window.expect("has the keyboard: True is in line mode: False")
