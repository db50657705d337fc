# SPDX-License-Identifier: Apache-2.0
"""The file of peers: what it may hold, and that it is read again when it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap import config as configuration
from infiniswap.discovery.static import PeersFile, only_these
from infiniswap.errors import ConfigError
from infiniswap.peers import PEERS_FILE_BYTES_MAX, PEERS_MAX, parse_peers, read_peers
from infiniswap.units import HostPort

A, B, C = (HostPort(f"10.0.0.{number}", 9400) for number in (1, 2, 3))


def test_a_list_may_have_comments_and_blank_lines() -> None:
    text = b"# donors\n10.0.0.1\r\n\n  10.0.0.2:9400  # second\n10.0.0.1:9400\n[::1]:7\n"
    assert parse_peers(text, "f") == (A, B, HostPort("::1", 7))
    assert parse_peers(b"", "f") == ()


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        (b"10.0.0.1\n10.0.0.2:x\n", r"f: line 2 is not an address. Write HOST"),
        (b"a b", "line 1"),
        (b"fe80::5\n", "f: line 1 is a link-local address, which means another host on each"),
        (b"10.0.0.1\n\xff\xfe", "byte 9 is no UTF-8"),
        (b"\0", "line 1"),
        (b"#" * (PEERS_FILE_BYTES_MAX + 1), "larger than 256 KiB"),
        ("\n".join(f"h{n}" for n in range(PEERS_MAX + 1)).encode(), f"more than {PEERS_MAX} peers"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(raw: bytes, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse_peers(raw, "f")


@pytest.mark.parametrize(
    "line",
    ["root:$y$hunter2:19000:0", "hunter2 hunter2", "[hunter2", "hunter2:hunter2", "hunter2:99999"],
)
def test_an_error_quotes_nothing_of_a_file_that_was_named_by_mistake(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "shadow"
    path.write_text(f"# of root\n{line}\n")
    with pytest.raises(ConfigError, match="line 2 is not an address") as caught:
        read_peers(path)
    assert "hunter2" not in str(caught.value)


@given(st.binary(max_size=2000))
def test_junk_is_a_list_or_a_clear_error(raw: bytes) -> None:
    message = ""
    try:
        peers = parse_peers(raw, "f")
    except ConfigError as error:
        message = str(error)
    if message:
        assert message.startswith("f: ")
        assert message.isprintable()
    else:
        assert parse_peers("\n".join(map(str, peers)).encode(), "f") == peers


def test_a_list_must_be_a_readable_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, wrong in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            read_peers(path)


def test_a_changed_list_is_in_force_when_it_rests_and_a_broken_one_never(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text("10.0.0.1\n")
    peers = PeersFile(path)
    peers.load()
    assert list(peers.peers) == [A]
    assert not peers.look()
    path.write_text("10.0.0.1\n10.0.0.2\n")
    assert not peers.look()  # somebody may still be writing
    path.write_text("10.0.0.1\n10.0.0.2\n10.0.0.3\n")
    assert not peers.look()
    assert peers.look()
    assert peers.peers == (A, B, C)
    assert not peers.look()
    for broken in ("10.0.0.1\nno address\n", None):
        path.unlink() if broken is None else path.write_text(broken)
        peers.look()
        assert peers.look()
        assert str(path) in peers.problem
        assert "3 former peers" in peers.problem
        assert peers.peers == (A, B, C)
        assert not peers.look()
    path.write_text("10.0.0.2\n")
    peers.look()
    assert peers.look()
    assert ([*peers.peers], peers.problem) == ([B], "")


def test_a_list_that_was_never_read_is_read_at_the_first_look(tmp_path: Path) -> None:
    peers = PeersFile(tmp_path / "peers")
    assert peers.look()
    assert "No such file" in peers.problem
    (tmp_path / "peers").write_text("10.0.0.3")
    peers.look()
    assert peers.look()
    assert peers.peers == (C,)


def test_the_configuration_adds_the_file_and_named_donors_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text("10.0.0.2\n10.0.0.3\n")
    values = {"cluster.peers": "10.0.0.1,10.0.0.2", "cluster.peers_file": str(path)}
    load = configuration.load
    assert load(Path("/dev/null"), values, {}).peers() == (A, B, C)
    assert load(Path("/dev/null"), {**values, **only_these("10.0.0.3")}, {}).peers() == (C,)
    assert only_these(None) == {}
