# SPDX-License-Identifier: Apache-2.0
"""Donors by name, wherever the command line takes their addresses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap import config as configuration
from infiniswap.cli.common import donors
from infiniswap.cli.common.donors import KnownDonor, is_address, named, unknown
from infiniswap.errors import UsageError
from infiniswap.units import CONTROL_PORT, HostPort


def known(name: str, number: int, donor: int | None = None) -> KnownDonor:
    """At 10.0.0.NUMBER; `donor`: its id, where it has several addresses."""
    one = number if donor is None else donor
    return KnownDonor(name, f"id-{one}", HostPort(f"10.0.0.{number}", CONTROL_PORT))


A, B, A2 = known("moon", 1), known("sun", 2), known("moon", 3)


@pytest.mark.parametrize(
    "text", ["10.0.0.2", "moon:9400", "::1", "[::1]", "[::1]:9400", " 10.0.0.2 ", "fe80::1%eth0"]
)
def test_an_address_is_never_a_name(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize("text", ["moon", "moon.example.org", "10.0.0", "my donor", "localhost"])
def test_a_word_may_be_a_name(text: str) -> None:
    assert not is_address(text)


def test_a_name_is_that_of_one_donor() -> None:
    assert named("moon", [A, B]) == A
    assert named("mars", [A, B]) is None
    assert named("mars", []) is None


def test_a_donor_with_two_addresses_is_one() -> None:
    assert named("moon", [A, known("moon", 9, donor=1)]) == A


def test_an_ambiguous_name_lists_the_candidates() -> None:
    with pytest.raises(UsageError, match="2 donors have the name moon") as caught:
        named("moon", [A, B, A2])
    assert "10.0.0.1:9400" in caught.value.what
    assert "10.0.0.3:9400" in caught.value.what
    assert "10.0.0.2" not in caught.value.what


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=12))
def test_a_name_never_leads_to_a_donor_of_another_name(pairs: list[tuple[str, int]]) -> None:
    found = [known(name, number) for name, number in pairs]
    for word in "abcd":
        ids = {one.donor_id for one in found if one.name == word}
        if len(ids) > 1:
            with pytest.raises(UsageError):
                named(word, found)
            continue
        one = named(word, found)
        assert (one is None) == (not ids)
        assert one is None or (one.name, one.donor_id) == (word, ids.pop())


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    error = unknown("mon", [A, B], [HostPort("10.0.0.7", 9400)])
    assert "no donor named mon" in error.what
    assert "The nearest known name is moon." in error.mend
    assert "moon (10.0.0.1:9400), sun (10.0.0.2:9400)" in error.mend
    assert "Without an answer: 10.0.0.7:9400" in error.mend
    many = unknown("x", [known(f"d{number}", number) for number in range(20)], [])
    assert many.mend.endswith("12 more.")


def test_names_of_others_cannot_forge_lines() -> None:
    assert unknown("a\x1b[2J\nERROR", [A], []).what.isprintable()


def config(peers: str = "") -> configuration.Config:
    return configuration.load(Path(os.devnull), {"cluster.peers": peers}, {})


def test_nobody_is_asked_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors, "_ask", lambda *_args, **_options: pytest.fail("asked"))
    assert donors.address_of("10.0.0.2", config()) == HostPort("10.0.0.2", CONTROL_PORT)
    assert donors.address_of("moon", config("moon,sun:9500")) == HostPort("moon", CONTROL_PORT)
    texts = ["10.0.0.2", "10.0.0.3:9500", "10.0.0.2:9400"]
    assert len(donors.addresses_of(texts, config())) == 2


def test_without_known_donors_a_word_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors, "_ask", lambda *_args, **_options: ([], []))
    assert donors.address_of("moon.invalid", config()) == HostPort("moon.invalid", CONTROL_PORT)
