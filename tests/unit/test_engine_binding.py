# SPDX-License-Identifier: Apache-2.0
"""The cffi binding: errors, ownership, and each structure's way across."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import re
import socket
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.stepped_engine import SimEngine, lib

import infiniswap
from infiniswap.device.frontends import FRONT_ENDS
from infiniswap.engine import build_cdef
from infiniswap.engine.native import NativeEngine, NativeStore, library_features, library_version
from infiniswap.engine.native_rdma import NativeRdmaOffer
from infiniswap.engine.protocol import (
    EngineConfig,
    EngineEvent,
    EventKind,
    FrontendConfig,
    RemoteConfig,
    SlabInfo,
    SlabState,
    histogram_quantiles,
)
from infiniswap.engine.store import TICKET_NUMBERS, LeaseStats, StoreConfig
from infiniswap.errors import BackupError, ConflictError, EngineError
from infiniswap.rdma_address import RdmaEnd, RdmaKey
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = pytest.mark.requires_native

SLAB_BYTES = MIB
NO_BACKUP = EngineConfig(
    size_bytes=4 * SLAB_BYTES, slab_bytes=SLAB_BYTES, staging_pages=512, no_backup=True
)
BACKED = dataclasses.replace(NO_BACKUP, no_backup=False)


@pytest.fixture
def store() -> Iterator[NativeStore]:
    with NativeStore(StoreConfig(slab_bytes=SLAB_BYTES, slabs_max=3)) as store:
        yield store


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    with NativeEngine(NO_BACKUP, None) as engine:
        yield engine


@pytest.fixture
def sim() -> Iterator[SimEngine]:
    with SimEngine(BACKED) as engine:
        yield engine


@contextlib.contextmanager
def failing(code: int, words: str = "") -> Iterator[None]:
    with pytest.raises(EngineError, match=words or None) as caught:
        yield
    assert caught.value.code == code


# ---- the library


def test_library_and_package_are_of_one_version() -> None:
    assert library_version() == infiniswap.__version__
    features = library_features()
    assert {"nbd", "nbd-socket"} <= features <= {*FRONT_ENDS, "far", "uring", "rdma", "seal"}


def test_enums_and_records_match_the_header(project_root: Path) -> None:
    header = (project_root / "csrc" / "include" / "isw.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)

    def numbers(prefix: str) -> dict[str, int]:
        found = re.findall(rf"^#define {prefix}_(\w+)\s+(\d+)\b", header, re.MULTILINE)
        return {name: int(value) for name, value in found}

    assert {kind.name: kind.value for kind in EventKind} == numbers("ISW_EVENT")
    assert {state.name: state.value for state in SlabState} == numbers("ISW_SLAB")

    def fields(struct: str) -> list[str]:
        body = re.search(rf"^struct {struct} {{(.*?)^}};", header, re.MULTILINE | re.DOTALL)
        assert body is not None
        return re.findall(r"(\w+)(?:\[\d+\])?;", body[1])

    def names(record: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(record)]

    assert names(EngineEvent) == fields("isw_event")
    assert names(StoreConfig) == fields("isw_store_config")
    assert names(LeaseStats) == fields("isw_lease_stats")
    assert names(SlabInfo) == fields("isw_slab_info")
    assert names(EngineConfig)[:-6] == fields("isw_engine_config")[:-3]
    offer = NativeRdmaOffer(None, 0).answered([], RdmaKey(0, 0))
    remote = {*names(RemoteConfig), *offer.fields()}
    assert remote - {"over"} == set(fields("isw_remote_config"))
    for record, struct in ((RdmaEnd, "isw_rdma_end"), (RdmaKey, "isw_rdma_key")):
        # The scope is this host's, and never sent.
        known = {field.name for field in msgspec.structs.fields(record)}
        assert known == set(fields(struct)) - {"scope"}


@pytest.mark.parametrize(
    "header", ["", "/* cdef begin */", "/* cdef end *//* cdef begin */", "/* cdef begin */" * 2]
)
def test_a_header_without_both_markers_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="cdef"):
        build_cdef.extract(header)


# ---- the store


def test_a_lease_from_slab_to_slot_and_back(store: NativeStore) -> None:
    store.preallocate()
    store.preallocate()
    assert store.stats()["slabs_free"] == 2
    lease = store.lease_create(2)
    assert re.fullmatch(r"[0-9a-f]{32}", store.ticket(lease, 0))
    assert store.ticket(lease, TICKET_NUMBERS - 1)
    with failing(errno.EINVAL):
        store.ticket(lease, TICKET_NUMBERS)
    store.ticket_end(lease, 0)
    slot = store.map(lease)
    assert slot is not None
    stats = store.lease_stats(lease)
    assert (stats.slots_mapped, stats.slots_max) == (1, 2)
    store.unmap(lease, slot.slot, slot.generation, 1000)
    assert store.stats()["slabs_dirty"] == 1
    assert store.scrub()
    assert not store.scrub()
    assert store.stats()["slabs_free"] == 2
    store.lease_destroy(lease)
    assert [store.release_free() for _ in range(3)] == [True, True, False]
    assert store.map(store.lease_create(1)) is None


def test_errors_carry_number_and_text(store: NativeStore) -> None:
    for _ in range(3):
        store.preallocate()
    with failing(errno.ENOSPC, r"cannot add a slab: .+"):
        store.preallocate()
    with failing(errno.ENOENT):
        store.lease_stats(4711)
    lease = store.lease_create(1)
    slot = store.map(lease)
    assert slot is not None
    with failing(errno.ESTALE):
        store.unmap(lease, slot.slot, slot.generation + 1, 1000)
    with failing(errno.EINVAL):
        NativeStore(StoreConfig(slab_bytes=PAGE_BYTES + 1, slabs_max=1))


def test_listening_gives_the_bound_port_and_a_taken_one_is_named(store: NativeStore) -> None:
    port = store.listen("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        assert client.recv(8) == b"NBDMAGIC"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"127.0.0.1 port {port}") as caught:
            store.listen("127.0.0.1", port)
    assert caught.value.code in (errno.EADDRINUSE, errno.EALREADY, errno.EBUSY)


def test_closing_twice_is_harmless_and_a_closed_store_says_so() -> None:
    store = NativeStore(StoreConfig(slab_bytes=SLAB_BYTES, slabs_max=1))
    store.close()
    store.close()
    with failing(errno.EBADF, "closed"):
        store.stats()


def test_closing_waits_for_calls_on_other_threads() -> None:
    store = NativeStore(StoreConfig(slab_bytes=SLAB_BYTES, slabs_max=1000))
    started = threading.Event()
    errors: list[int] = []

    def work() -> None:
        started.set()
        try:
            for _ in range(1000):
                store.preallocate()
        except EngineError as error:
            errors.append(error.code)

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(work) for _ in range(2)]
        started.wait(10)
        store.close()
        for call in calls:
            call.result(60)
    assert set(errors) <= {errno.EBADF, errno.ENOSPC}


# ---- the engine


def test_a_fresh_engine_is_empty(engine: NativeEngine) -> None:
    assert engine.events() == []
    assert engine.remotes() == []
    assert [(slab.state, slab.remote) for slab in engine.slabs()] == [
        (SlabState.UNMAPPED, None)
    ] * 4
    stats = engine.stats()
    assert stats["staging_pages"] == 512
    assert stats["pages_in"] == 0
    assert "read_latency" not in stats
    assert sum(engine.figures().latency["read_latency"]) == 0
    assert engine.eventfd > 2


def test_an_unreachable_donor_is_named(engine: NativeEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = RemoteConfig("127.0.0.1", port, ("0" * 32,) * 2, SLAB_BYTES, connect_ms_max=1000)
    with pytest.raises(EngineError, match=f"127.0.0.1 port {port}"):
        engine.remote_connect(config)


def test_store_and_engine_talk(store: NativeStore, engine: NativeEngine) -> None:
    store.preallocate()
    lease = store.lease_create(2)
    port = store.listen("127.0.0.1", 0)
    config = RemoteConfig(
        "127.0.0.1", port, (store.ticket(lease, 0), store.ticket(lease, 1)), 2 * SLAB_BYTES
    )
    remote = engine.remote_connect(config)
    slot = store.map(lease)
    assert slot is not None
    engine.slab_map(1, remote, slot.slot, slot.generation)
    slab = engine.slabs()[1]
    assert (slab.state, slab.remote, slab.slot) == (SlabState.MAPPED, remote, slot.slot)
    with failing(errno.EBUSY):
        engine.slab_map(1, remote, slot.slot, slot.generation)
    (info,) = engine.remotes()
    assert (info.remote, info.state, info.queues) == (remote, "up", config.queues)
    engine.slab_unmap(1, remote, slot.generation)
    (event,) = engine.events()
    assert (event.kind, event.slab, event.remote, event.generation) == (
        EventKind.SLAB_DRAINED, 1, remote, slot.generation,
    )  # fmt: skip
    engine.remote_destroy(remote)


def test_the_backups_place_is_named_when_it_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "none" / "x.backup"
    with pytest.raises(BackupError, match=re.escape(str(path))):
        NativeEngine(BACKED, str(path))


def test_a_backup_has_one_owner(tmp_path: Path) -> None:
    path = str(tmp_path / "backup")
    with NativeEngine(BACKED, path), pytest.raises(ConflictError, match=re.escape(path)):
        NativeEngine(BACKED, path)
    NativeEngine(BACKED, path).close()


def test_the_engine_closes_front_ends_that_are_open(engine: NativeEngine, tmp_path: Path) -> None:
    path = tmp_path / "s"
    closed = engine.frontend("nbd-socket", FrontendConfig(path=str(path)))
    closed.close()
    closed.close()
    frontend = engine.frontend("nbd-socket", FrontendConfig(path=str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        assert client.recv(8) == b"NBDMAGIC"
    engine.close()
    engine.close()
    assert not path.exists()
    frontend.close()


def test_a_forgotten_engine_warns_and_closes_its_front_ends(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def forget() -> None:
        NativeEngine(NO_BACKUP, None).frontend("nbd-socket", FrontendConfig(path=str(path)))
        gc.collect()

    with pytest.warns(ResourceWarning, match="NativeEngine"):
        forget()
    assert not path.exists()


# ---- the stepped engine


def test_a_new_donor_is_filled_from_the_backup(sim: SimEngine) -> None:
    pages = SLAB_BYTES // PAGE_BYTES
    data = bytes(range(256)) * 16 * 3
    take, done = lib.ISW_STEP_BACKUP_TAKE, lib.ISW_STEP_BACKUP_DONE

    def settle() -> None:
        while sim.step(take, 0) or sim.step(take, 1) or sim.step(done):
            pass

    sim.submit(lib.ISW_SIM_WRITE, PAGE_BYTES, 3 * PAGE_BYTES, data)
    settle()
    assert sim.reap() is not None
    with failing(errno.ESTALE):
        sim.slab_fill(0, 1, 0, 1)
    sim.slab_map(0, sim.remote(1, 4), 0, 7)
    assert sim.slab_fill(0, 7, 0, 2) == (2, 3)
    assert sim.slab_fill(0, 7, 3, 100) == (1, pages)
    settle()
    assert sim.step(lib.ISW_STEP_REMOTE_REPLY)
    assert sim.step(lib.ISW_STEP_REMOTE_REPLY)
    stats = sim.stats()
    assert (stats["pages_copied"], stats["pages_copy_dropped"]) == (3, 0)
    assert sim.slabs()[0].remote_valid_pages == 3
    assert sim.slab_fill(0, 7, 0, 100) == (0, pages)


def test_too_little_data_is_refused_before_c_reads_it(sim: SimEngine) -> None:
    with pytest.raises(ValueError, match="request of 4096"):
        sim.submit(lib.ISW_SIM_WRITE, 0, PAGE_BYTES, b"short")


# ---- quantiles


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_a_quantile_is_the_bound_that_enough_requests_stay_below(
    buckets: list[int], quantiles: list[float]
) -> None:
    bounds = [float(number + 1) for number in range(len(buckets))]
    total = sum(buckets)
    for quantile, value in zip(
        quantiles, histogram_quantiles(buckets, bounds, quantiles), strict=True
    ):
        if total == 0:
            assert value == 0.0
            continue
        within = sum(c for c, b in zip(buckets, bounds, strict=True) if b <= value)
        below = sum(c for c, b in zip(buckets, bounds, strict=True) if b < value)
        assert within >= quantile * total
        assert below < max(1.0, quantile * total)
        assert buckets[bounds.index(value)] > 0


def test_a_quantile_outside_of_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="quantile"):
        histogram_quantiles([1], [1.0], [1.5])


def test_an_unclosed_warning_is_an_error_in_this_suite() -> None:
    with pytest.raises(ResourceWarning):
        warnings.warn("unclosed", ResourceWarning, stacklevel=1)
