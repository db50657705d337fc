# SPDX-License-Identifier: Apache-2.0
"""Configuration: layers, unknown keys, ranges, the secret."""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap import config as configuration
from infiniswap.config import SECTIONS, Config, DaemonConfig, env_name, known_keys, load
from infiniswap.errors import ConfigError
from infiniswap.keys import derive
from infiniswap.secret import (
    check_listen_secret,
    check_metrics_listen,
    make_host_secret,
    read_host_key,
    read_metrics_token,
    read_secret,
)
from infiniswap.units import GIB, MIB, PAGE_BYTES, HostPort


@pytest.fixture(autouse=True)
def _no_default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(configuration, "DEFAULT_PATH", tmp_path / "none.toml")


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "infiniswap.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    config = load(environ={})
    assert config == Config()
    assert config.daemon.slab_bytes == config.device.slab_bytes == GIB
    assert config.policy.activity_alpha == config.policy.memory_beta == 0.2
    assert config.policy.hot_pages_per_s == 20
    assert config.policy.choices == 2
    assert config.policy.headroom_fraction == 8 / 64
    assert config.daemon.listen == HostPort("127.0.0.1", 9400)
    assert config.daemon.data_port == 9401


def test_flags_beat_environment_beats_the_file_which_it_names(tmp_path: Path) -> None:
    path = _file(tmp_path, '[daemon]\nslab = "64M"\npool = "1G"\ndata_port = 1\n')
    env = {"INFINISWAP_DAEMON_POOL": "auto", "INFINISWAP_DAEMON_DATA_PORT": "2"}
    env["INFINISWAP_CONFIG"] = str(path)
    config = load(None, {"daemon.data_port": 3, "daemon.name": None}, env)
    assert config.daemon == DaemonConfig(slab_bytes=64 * MIB, pool_bytes=None, data_port=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slab = 1", "unknown key 'slab' outside of any section"),
        ("daemon = 1", "'daemon' is a section, not a key"),
        ("[daemon", "not valid TOML"),
        ('[device]\nslab = "1.5Q"', "device.slab: '1.5Q' is not a size"),
        ("[device]\nslab = 1048577", "not a multiple of 4K"),
        ("[device]\nslab = 4096", "out of range"),
        ("[device]\nslab = true", "True is not a size"),
        ('[device]\nqueues = "2x"', "'2x' is not a whole number"),
        ("[device]\nqueues = 17", "It must be at least 1 and at most 16."),
        ("[device]\nqueues = 2.5", "2.5 is not a whole number"),
        ('[device]\nfrontend = "fues"', "The nearest known value is fuse."),
        ('[device]\nbackup_dir = "x"', "backup_dir: it is not an absolute path"),
        ('[device]\nbackup_dir = ""', "device.backup_dir is empty"),
        ('[device]\nbackup_dir = "/a\\u0000b"', "NUL"),
        ("[policy]\nactivity_alpha = 0", "above 0.0"),
        ("[policy]\nactivity_alpha = nan", "not a number"),
        ('[cluster]\npeers = "a:b:c"', "is not an address"),
        ("[cluster]\npeers = [1]", "1 is not an address"),
        ("[cluster]\npeers = 1", "1 is not a list"),
        ("[daemon]\nlisten = 9400", "9400 is not an address"),
        ("[daemon]\nname = 1", "1 is not text"),
        ("[device]\nseal = 1", "device.seal: 1 is neither true nor false. Write true or false."),
        ('[device]\nseal = "on"', "'on' is neither true nor false"),
        ('[device]\nrequest = "32M"\nstaging = "32M"', "Raise device.staging to 64M or more."),
    ],
)
def test_a_mistake_names_file_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    assert message in str(caught.value)


def test_a_switch_is_written_the_same_way_everywhere(tmp_path: Path) -> None:
    assert load(environ={}).device.seal
    assert not load(_file(tmp_path, "[device]\nseal = false"), environ={}).device.seal
    assert not load(environ={"INFINISWAP_DEVICE_SEAL": "false"}).device.seal
    assert not load(overrides={"device.seal": "false"}, environ={}).device.seal
    flags = {"device.seal": True}
    assert load(overrides=flags, environ={"INFINISWAP_DEVICE_SEAL": "false"}).device.seal


def test_variables_of_others_and_of_the_tests_are_left_alone() -> None:
    env = {"INFINISWAP_CI": "1", "INFINISWAP_TEST_THING": "1", "INFINISWAP_VM_HOST": "h1"}
    assert load(environ=env) == Config()


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("daemon.pool", "4", "Did you mean 4G? A number without a letter counts bytes."),
        ("daemon.headroom", 8, "Did you mean 8G? A number"),
        ("device.slab", 1, "Did you mean 1G? A number"),
        ("device.staging", "128", "Did you mean 128M? A number"),
        ("device.request", 1, "Did you mean 1M? A number"),
        ("device.slab", "3K", "at least 1M and at most 64G"),
        ("device.speed", 1, "unknown key device.speed"),
        ("daemon.slab", "auto", "'auto' is not a size"),
    ],
)
def test_a_mistake_in_a_flag_is_told_with_what_was_meant(
    key: str, value: object, meant: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(meant)):
        load(overrides={key: value}, environ={})


def test_every_key_has_an_environment_variable_of_its_own() -> None:
    names = {env_name(key) for key in known_keys()}
    assert len(names) == sum(len(dataclasses.fields(kind)) for kind in SECTIONS.values())
    # Sizes in keys carry no unit, and fields do.
    assert "INFINISWAP_DAEMON_SLAB" in names
    assert "INFINISWAP_DAEMON_SLAB_BYTES" not in names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"#" * (MIB + 1), "larger than 1 MiB"),
        (b"\xff\xfe", "not valid TOML"),
        (b"hunter2\xff\n", "byte 7 is no UTF-8"),
        (b'[cluster]\nsecret_file = "hunter2/+="', "line 2: cluster.secret_file: it is not a"),
        (b"[cluster]\nsecret_file = ['hunter2']", "line 2: cluster.secret_file: it is not a"),
        (b'[cluster]\nmetrics_token_file = "hunter2"', "metrics_token_file: it is not a"),
        (b'[cluster]\npeers_file = "hunter2"', "peers_file: it is not a"),
    ],
)
def test_a_file_that_is_none_and_a_secret_in_it_are_refused_without_a_quote(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, environ={})
    assert "hunter2" not in str(caught.value)
    assert "0xff" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "cannot read"), ("none.toml", r"none\.toml: no such configuration file")],
)
def test_a_file_that_was_named_must_exist(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, environ={})


@given(st.dictionaries(st.sampled_from([env_name(k) for k in known_keys()]), st.text(max_size=12)))
def test_any_environment_is_a_configuration_or_a_config_error(env: dict[str, str]) -> None:
    try:
        config = load(environ=env)
    except ConfigError:
        return
    assert config.device.slab_bytes % PAGE_BYTES == 0
    assert config.policy.evict_slabs_max >= 1


# ------------------------------------------------------- the secret, and the metrics token


Read = Callable[[Path], object]
both = pytest.mark.parametrize("read", [read_secret, read_metrics_token])


def _secret(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_configuration_reads_its_secrets_without_white_space(tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    for text in (secret.hex().encode(), base64.b64encode(secret)):
        path = str(_secret(tmp_path, b"\n%b \n" % text))
        files = {"cluster.secret_file": path, "cluster.metrics_token_file": path}
        config = load(overrides=files, environ={})
        assert config.keys() == derive(secret)
        assert config.metrics_token() == text
    assert Config().metrics_token() is None


def test_where_no_secret_is_configured_the_hosts_own_counts(tmp_path: Path) -> None:
    config = load(overrides={"daemon.state_dir": str(tmp_path)}, environ={})
    assert (config.keys(), config.secret_file()) == (None, None)
    make_host_secret(tmp_path)
    own = config.keys()
    assert own is not None
    assert config.secret_file() == tmp_path / "host-secret"
    assert stat.S_IMODE((tmp_path / "host-secret").stat().st_mode) == 0o600
    make_host_secret(tmp_path)  # of a second daemon
    assert config.keys() == own


def test_a_host_key_that_cannot_be_read_names_the_key_that_says_where_it_is(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"orrect device\.backup_dir"):
            read_host_key(path)


@both
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700, 0o622])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int, read: Read) -> None:
    with pytest.raises(ConfigError, match=r"other users.*chmod 600"):
        read(_secret(tmp_path, b"0123456789abcdef", mode))


@pytest.mark.parametrize("content", [b"", b"short", b"   0123456789abcde   ", b"x" * 5000])
def test_a_token_of_the_wrong_length_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="bytes") as caught:
        read_metrics_token(_secret(tmp_path, content))
    assert content.strip().decode() not in str(caught.value) or not content.strip()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"correct horse battery staple",
        b"0123456789abcdef0123456789abcdef",
        b"0123456789abcdef" * 4,
        b"c" * 64,
        base64.b64encode(b"a passphrase of 32 bytes, typed!")[:-4],
        b"x" * 5000,
        b"session-key:" + b"0" * 63,
    ],
)
def test_a_secret_that_was_typed_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_secret(_secret(tmp_path, content))
    assert "infiniswap init --secret" in caught.value.mend or not 0 < len(content) < 5000
    assert not content or content.decode() not in str(caught.value)


def test_a_token_is_visible_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="visible ASCII"):
        read_metrics_token(_secret(tmp_path, b"two words of text"))


@both
def test_a_missing_secret_a_directory_and_a_fifo_are_refused(tmp_path: Path, read: Read) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the (cluster secret|metrics token)"):
        read(tmp_path / "none")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (tmp_path, fifo):
        with pytest.raises(ConfigError, match="not a regular file"):
            read(path)


@pytest.mark.requires_root
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = _secret(tmp_path, b"0123456789abcdef")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_secret(path)


def test_serving_others_needs_a_secret_and_loopback_none() -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "donor1"):
        with pytest.raises(ConfigError, match="needs a cluster secret"):
            check_listen_secret(HostPort(host, 9400), None)
        check_listen_secret(HostPort(host, 9400), Path("/etc/infiniswap/secret"))
    for host in ("127.0.0.1", "::1"):
        check_listen_secret(HostPort(host, 9400), None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "donor1", "127.0.0.1", "::1"])
def test_metrics_at_a_port_need_a_token_or_certificates(host: str) -> None:
    listen = HostPort(host, 9402)
    with pytest.raises(ConfigError, match="metrics_token_file"):
        check_metrics_listen(listen, None, None)
    check_metrics_listen(listen, b"0123456789abcdef", None)
    check_metrics_listen(listen, None, Path("/etc/infiniswap/ca.pem"))
    check_metrics_listen(None, None, None)
