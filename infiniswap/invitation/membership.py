# SPDX-License-Identifier: Apache-2.0
"""What a host that joins writes: the configuration, and the files beside it that it names.

    DIR/.join-NAME     while it is written; the next join removes what a killed one has left
        NAME           by its own name once everything is on the disk; a name that is taken by
                       something else gets a number
        CONFIG         replaced last, by one rename: from then on the host belongs to the cluster

Whoever is killed in between has changed nothing that any configuration names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from infiniswap import config as configuration
from infiniswap import keys
from infiniswap.config_text import toml_value
from infiniswap.control.pki import made_of
from infiniswap.directories import make_directory
from infiniswap.errors import (
    ConfigError,
    ConflictError,
    InfiniswapError,
    ProtocolMismatchError,
    UsageError,
    from_oserror,
)
from infiniswap.invitation.messages import Offer
from infiniswap.invitation.offer import CERTIFICATE
from infiniswap.peers import PEERS_MAX
from infiniswap.secret import CertificateFiles, CertificateTexts
from infiniswap.system.files import sync_directory
from infiniswap.toml_lines import with_keys
from infiniswap.units import HostPort, format_size, parse_host_port

if TYPE_CHECKING:
    from infiniswap.config import Config

SECRET_FILE: Final = "secret"
_STAGED: Final = ".join-"
_PROBE_BYTES: Final = 64 * 1024
_NAMES_MAX: Final = 1000
_OWN: Final = 0o600
_PUBLIC: Final = 0o644

_TRUST: Final = (
    *("cluster.secret_file", "cluster.second_secret_file"),
    *("cluster.ca_file", "cluster.certificate_file", "cluster.key_file"),
)
_DISCOVERY: Final = (
    *("cluster.name", "cluster.discovery", "cluster.peers", "cluster.peers_file"),
    *("mqtt.broker", "mqtt.protocol", "mqtt.username", "mqtt.password_file"),
    *("mqtt.tls", "mqtt.ca_file", "mqtt.cert_file", "mqtt.key_file"),
)
KEYS: Final = (*_TRUST, *_DISCOVERY)
"""What makes a host a member of a cluster."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file beside the configuration.

    Attributes:
        path: where.
        content: of it.
        mode: of it.
        is_there: a file with this content is there already.
    """

    path: Path
    content: bytes = field(repr=False)
    mode: int
    is_there: bool


@dataclass(frozen=True, slots=True)
class Joining:
    """What joining changes on this host.

    Attributes:
        path: of the configuration.
        files: beside it.
        values: keys of the configuration, as TOML; None: taken away.
    """

    path: Path
    files: tuple[NewFile, ...]
    values: Mapping[str, str | None]

    @property
    def set_keys(self) -> dict[str, str]:
        """Those that get a value."""
        return {key: value for key, value in self.values.items() if value is not None}


def memberships(config: Config) -> list[str]:
    """Keys that show that a host belongs to a cluster already."""
    found = []
    for key, _, _ in configuration.entries():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        if key in KEYS and getattr(part, name) != getattr(type(part)(), name):
            found.append(key)
    return found


def plan(
    path: Path,
    offer: Offer,
    key: bytes,
    listen: HostPort | None,
    mend: str = "",
    *,
    preview: bool = False,
) -> Joining:
    """What an offer changes. Blocking: it looks for names that are free.

    Args:
        path: of the configuration.
        offer: of the inviting host.
        key: of this host's certificate, in PEM form.
        listen: where this host's daemon will listen; None: as it is configured now.
        mend: what else has to be done again after an error.
        preview: the offer has no secrets.

    Raises:
        ProtocolMismatchError: the offer has something that cannot be written.
    """
    try:
        found = _plan(path, offer, key, listen)
        if not preview:
            _check(found, offer)
        return found
    except (ValueError, UsageError) as error:
        raise ProtocolMismatchError(
            f"what the inviting host offers cannot be used: {error}",
            mend="Install the same release of Infiniswap on both hosts. This host is unchanged."
            f" {mend}".rstrip(),
        ) from error


def _plan(path: Path, offer: Offer, key: bytes, listen: HostPort | None) -> Joining:
    files: dict[str, NewFile] = {}

    def add(name: str, at: str, text: str | bytes, mode: int) -> None:
        content = text if isinstance(text, bytes) else f"{text.rstrip()}\n".encode()
        files[at] = _named(path.with_name(name), content, mode)

    if offer.kind == CERTIFICATE:
        add("ca.pem", "cluster.ca_file", offer.authority, _PUBLIC)
        add("certificate.pem", "cluster.certificate_file", offer.certificate, _PUBLIC)
        add("key.pem", "cluster.key_file", key, _OWN)
    else:
        add(SECRET_FILE, "cluster.secret_file", offer.secret, _OWN)
        if offer.second_secret:
            add("second-secret", "cluster.second_secret_file", offer.second_secret, _OWN)
    peers = tuple(dict.fromkeys(parse_host_port(peer) for peer in offer.peers[:PEERS_MAX]))
    slab = f'"{format_size(offer.slab_bytes)}"'
    values: dict[str, str | None] = dict.fromkeys(KEYS)
    values |= {"daemon.slab": slab, "device.slab": slab}
    if listen is not None:
        values["daemon.listen"] = toml_value(listen, {})
    if offer.cluster != configuration.ClusterConfig().name:
        values["cluster.name"] = toml_value(offer.cluster, {})
    if peers:
        values["cluster.peers"] = toml_value(peers, {})
    if offer.broker is not None:
        broker = offer.broker
        values["cluster.discovery"] = '"mqtt"'
        values["mqtt.broker"] = toml_value(parse_host_port(broker.address, 0), {})
        values["mqtt.protocol"] = toml_value(broker.protocol, {})
        values["mqtt.tls"] = toml_value(broker.tls, {})
        if broker.username:
            values["mqtt.username"] = toml_value(broker.username, {})
            add("broker-password", "mqtt.password_file", broker.password, _OWN)
        if broker.authority:
            add("broker-ca.pem", "mqtt.ca_file", broker.authority, _PUBLIC)
    values |= {at: toml_value(file.path, {}) for at, file in files.items()}
    return Joining(path, tuple(files.values()), values)


def _named(path: Path, content: bytes, mode: int) -> NewFile:
    """The file by its name, or by one with a number where something else has the name."""
    for number in range(1, _NAMES_MAX):
        name = path.stem if number == 1 else f"{path.stem}-{number}"
        found = path.with_name(name + path.suffix)
        if not os.path.lexists(found):
            return NewFile(found, content, mode, is_there=False)
        if _holds(found, content, mode):
            return NewFile(found, content, mode, is_there=True)
    raise ValueError(f"there are {_NAMES_MAX} files called {path.stem}")


def _holds(path: Path, content: bytes, mode: int) -> bool:
    """Whether this very file is there, and nobody but this user could have put it there."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        is_ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
        return is_ours and not status.st_mode & 0o777 & ~mode and path.read_bytes() == content
    return False


def _check(wanted: Joining, offer: Offer) -> None:
    """Raises ValueError: secret or certificate cannot be used."""
    if offer.kind != CERTIFICATE:
        for text in (offer.secret, *filter(None, (offer.second_secret,))):
            keys.parse(text.strip().encode())
        return
    ca, own, key = wanted.files[:3]
    texts = CertificateTexts(ca.content, own.content, key.content)
    try:
        made_of(texts, CertificateFiles(ca.path, own.path, key.path), offer.cluster, None)
    except InfiniswapError as error:
        raise ValueError(error.what) from error


# --------------------------------------------------------------------------- writing


def check_writable(path: Path, mend: str = "") -> None:
    """Whether the configuration and files beside it can be written. Asked before the password is
    sent, as an invitation is good once.

    Args:
        path: of the configuration.
        mend: what has not happened yet, for an error.

    Raises:
        NotPermittedError, SystemCallError: they cannot.
    """
    probe = path.with_name(f"{_STAGED}probe")
    try:
        make_directory(path.parent, 0o755)  # a daemon of another user reads here
        with _locked(path.parent):
            _clear(path.parent)
            _write(probe, bytes(_PROBE_BYTES), _OWN)
            probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        raise from_oserror(
            "the configuration of this host cannot be written",
            error,
            where=str(path.parent),
            mend=f"{_mend(error)} {mend}".rstrip(),
        ) from error


def _mend(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "Run it with sudo, or name a file of yours with --config."
    return "Make room there, or name a file elsewhere with --config."


def apply(
    wanted: Joining,
    compose: Callable[[], str],
    mend: str = "",
    step: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes everything.

    Args:
        wanted: what.
        compose: the text of a configuration where there is none yet.
        mend: what else has to be done again after an error.
        step: called before each change of the directory, for tests.

    Raises:
        ConflictError: another join is writing, or the configuration was changed meanwhile.
        ConfigError: the configuration that is there, or would be there, cannot be used.
        NotPermittedError, SystemCallError: it cannot be written; this host is as it was.
    """
    directory = wanted.path.parent
    named: list[Path] = []
    is_done = False
    try:
        with _locked(directory):
            _clear(directory)
            try:
                text = _configured(wanted, compose, mend)
                config = directory / f"{_STAGED}config"
                staged = {
                    file: directory / f"{_STAGED}{file.path.name}"
                    for file in wanted.files
                    if not file.is_there
                }
                for file, temporary in staged.items():
                    step(f"write {file.path.name}")
                    _write(temporary, file.content, file.mode)
                step("write config")
                _write(config, text.encode(), _OWN)
                _like(config, wanted.path)
                for file, temporary in staged.items():
                    step(f"name {file.path.name}")
                    _name(temporary, file.path)
                    named.append(file.path)
                sync_directory(directory)
                _check_whole(config, wanted.path, mend)
                step("commit")
                config.replace(wanted.path)
                is_done = True
                sync_directory(directory)
            finally:
                if not is_done:
                    for path in named:
                        path.unlink(missing_ok=True)
                _clear(directory)
    except OSError as error:
        if not is_done:
            what = "the configuration of this host cannot be written"
            raise from_oserror(
                what,
                error,
                where=str(directory),
                mend=f"This host is unchanged. {_mend(error)} {mend}".rstrip(),
            ) from error


def _configured(wanted: Joining, compose: Callable[[], str], mend: str) -> str:
    try:
        before = wanted.path.read_text(encoding="utf-8")
    except FileNotFoundError:
        before = compose()
    return _changed(wanted.path, before, wanted.values, mend)


def _changed(path: Path, before: str, values: Mapping[str, str | None], mend: str) -> str:
    try:
        return with_keys(before, values)
    except ValueError as error:
        raise ConfigError(
            f"this file cannot be changed: {error}",
            where=str(path),
            mend="Put that comment on a line of its own, or take the keys of [cluster] and [mqtt] "
            f"out of the file. This host is unchanged. {mend}".rstrip(),
        ) from error


def check_changeable(path: Path, keys: Iterable[str], mend: str = "") -> None:
    """Whether the configuration that is there can be changed. Asked before the password is sent.

    Args:
        path: of the configuration.
        keys: that an offer may change besides those of KEYS.
        mend: what has not happened yet, for an error.

    Raises:
        ConfigError, NotPermittedError, SystemCallError: it cannot.
    """
    # No value is like these, so each line that an offer could change has to change.
    values: dict[str, str | None] = dict.fromkeys(KEYS)
    values |= dict.fromkeys(("cluster.secret_file", *keys), '"?"')
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_oserror("cannot be read", error, where=str(path), mend=mend) from error
    _changed(path, text, values, mend)


def _check_whole(config: Path, path: Path, mend: str) -> None:
    try:
        configuration.load(config, environ={})
    except ConfigError as error:
        raise ConfigError(
            f"with the cluster's keys this file could not be used: {error.what}",
            where=str(path),
            mend=f"{error.mend} This host is unchanged. {mend}".rstrip(),
        ) from error


def _name(temporary: Path, path: Path) -> None:
    """Never in the place of another file; file systems without hard links (vfat) rename."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(path):
            raise
        temporary.replace(path)


def _write(path: Path, content: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, _OWN), "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.fsync(file.fileno())


def _like(path: Path, former: Path) -> None:
    """Gives a file mode and owner of the one whose place it takes; everybody may read a new one."""
    try:
        status = former.stat()
    except FileNotFoundError:
        os.chmod(path, _PUBLIC)
    else:
        os.chmod(path, stat.S_IMODE(status.st_mode))
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):
                os.chown(path, status.st_uid, status.st_gid)


def _clear(directory: Path) -> None:
    """Removes what a join has staged. Only under the lock."""
    for path in directory.glob(f"{_STAGED}*"):
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises OSError; ConflictError: another join has the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                "another `infiniswap join` is at work here",
                where=str(directory),
                mend="Wait for it.",
            ) from None
        yield
    finally:
        os.close(descriptor)


def replace_text(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a file, at once or not at all; mode, owner and links to it stay.

    Args:
        path: of the file.
        change: gets the text that is there, and returns the next one.

    Raises:
        OSError: it cannot be written; the file is as it was.
        ConflictError: a join is at work.
        ValueError: raised by `change`.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{_STAGED}{path.name}")
    with _locked(path.parent):
        _clear(path.parent)
        try:
            text = change(path.read_text(encoding="utf-8"))
            _write(temporary, text.encode(), _OWN)
            _like(temporary, path)
            temporary.replace(path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
