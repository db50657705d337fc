# SPDX-License-Identifier: Apache-2.0
"""Who gets an invitation: one host, once, in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infiniswap.invitation.once import LIFETIME_S, Invitation, Verdict

PASSWORD = bytes(range(16))


def test_the_first_gets_it_and_no_other() -> None:
    invitation = Invitation(PASSWORD, 1000.0)
    assert invitation.present(PASSWORD, "a", 1001.0, preview=False) is Verdict.GIVEN
    assert invitation.given_to == "a"
    for host in ("a", "b"):
        assert invitation.present(PASSWORD, host, 1002.0, preview=False) is Verdict.USED
        assert invitation.present(PASSWORD, host, 1002.0, preview=True) is Verdict.USED


def test_it_is_good_for_ten_minutes() -> None:
    for after_s, verdict in ((LIFETIME_S - 0.001, Verdict.GIVEN), (LIFETIME_S, Verdict.LATE)):
        invitation = Invitation(PASSWORD, 5.0)
        assert invitation.present(PASSWORD, "a", 5.0 + after_s, preview=False) is verdict
    assert LIFETIME_S == 600


def test_a_preview_leaves_it_open() -> None:
    invitation = Invitation(PASSWORD, 0.0)
    for _ in range(3):
        assert invitation.present(PASSWORD, "a", 1.0, preview=True) is Verdict.PREVIEWED
    assert invitation.present(PASSWORD, "a", 1.0, preview=False) is Verdict.GIVEN


def test_wrong_passwords_are_counted_and_end_nothing() -> None:
    invitation = Invitation(PASSWORD, 0.0)
    for _ in range(1000):
        assert invitation.present(b"x" * 16, "a", 1.0, preview=False) is Verdict.WRONG
    assert invitation.wrong == 1000
    assert invitation.present(PASSWORD, "a", 1.0, preview=False) is Verdict.GIVEN


def test_a_wrong_password_learns_nothing_of_the_state() -> None:
    given, late = Invitation(PASSWORD, 0.0), Invitation(PASSWORD, 0.0)
    given.present(PASSWORD, "a", 1.0, preview=False)
    assert given.present(b"x" * 16, "b", 1.0, preview=False) is Verdict.WRONG
    assert late.present(b"x" * 16, "b", 9999.0, preview=False) is Verdict.WRONG


STEPS = st.tuples(
    st.sampled_from((PASSWORD, b"", b"x" * 16, PASSWORD[:15], PASSWORD + b"\0")),
    st.sampled_from("abcdef"),
    st.floats(0, 2 * LIFETIME_S),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=120))
def test_whatever_comes_in_whatever_order(steps: list[tuple[bytes, str, float, bool]]) -> None:
    invitation = Invitation(PASSWORD, 0.0)
    given_times = 0
    for password, host, now_s, preview in sorted(steps, key=lambda step: step[2]):
        verdict = invitation.present(password, host, now_s, preview=preview)
        if verdict in (Verdict.GIVEN, Verdict.PREVIEWED):
            assert password == PASSWORD
            assert now_s < LIFETIME_S
            assert not given_times
        given_times += verdict is Verdict.GIVEN
    assert given_times <= 1
    assert bool(invitation.given_to) == bool(given_times)
