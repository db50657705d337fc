# SPDX-License-Identifier: Apache-2.0
"""infiniswap.ui: what a browser gets of a picture of the cluster."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.donors.hostile_donor import lease, status

from infiniswap.control import messages as m
from infiniswap.ui import model as made
from infiniswap.units import GIB, HostPort
from infiniswap.watch.asking import AskedDonor
from infiniswap.watch.memory_parts import memory_parts
from infiniswap.watch.picture import Picture, look

SUN, MOON = HostPort("10.0.0.1", 9400), HostPort("10.0.0.2", 9400)
NAMES = {str(SUN): "sun", str(MOON): "moon"}
DEVICE = "00000000-0000-0000-0000-00000000000a"


def device(**changes: Any) -> dict[str, Any]:
    return {"uptime_s": 10.0, "size_bytes": 4 * GIB, "slabs": 4, **changes}


def donor(address: HostPort, *leases: dict[str, Any], **changes: Any) -> AskedDonor:
    said = status(leases=list(leases), donor_name=NAMES[str(address)], **changes)
    return AskedDonor(address, msgspec.convert(said, m.Status), "")


def silent(address: HostPort) -> AskedDonor:
    return AskedDonor(address, None, "no answer within 2 s")


def looked(*looks: list[AskedDonor]) -> tuple[list[Picture], list[dict[str, made.DeviceView]]]:
    """Pictures two seconds apart, and the devices of each."""
    pictures: list[Picture] = []
    views: list[dict[str, made.DeviceView]] = []
    for number, donors in enumerate(looks):
        before = pictures[-1] if pictures else None
        pictures.append(look(before, donors, (), (), 100.0 + 2.0 * number))
        views.append(made.devices(pictures[-1], views[-1] if views else {}))
    return pictures, views


def cells(picture: Picture, views: dict[str, made.DeviceView]) -> list[Any]:
    (row,) = made.model(picture, views)["devices"]
    listed: list[Any] = row["cells"]
    return listed


# ------------------------------------------------------------------------------- bars


@given(
    total=st.integers(1, 1 << 45),
    available=st.floats(0, 1),
    lent=st.floats(0, 1),
    headroom=st.floats(0, 1),
    cache=st.integers(0, 1 << 46),
)
def test_the_parts_of_a_bar_are_the_whole_memory(
    total: int, available: float, lent: float, headroom: float, cache: int
) -> None:
    left = total - int(total * available)
    slabs = int(left * lent) // GIB
    said = status(
        memory__total_bytes=total,
        memory__available_bytes=total - left,
        memory__headroom_bytes=int(total * headroom),
        pool__slabs_mapped=slabs,
        pool__slabs_free=0,
    )
    said["memory"]["cache_bytes"] = cache
    parts = memory_parts(msgspec.convert(said, m.Status))
    assert sum(parts.values()) == total
    assert min(parts.values()) >= 0
    assert parts["headroom"] <= int(total * headroom)
    assert parts["lent"] == slabs * GIB


def test_a_host_says_who_holds_its_memory() -> None:
    other = lease(lease=2, device_id=DEVICE[:-1] + "b", host_name="h2", slots_mapped=1)
    pictures, views = looked(
        [donor(SUN, lease(slots_mapped=2), other, pool__slabs_mapped=3, pool__slabs_free=1)]
    )
    (row,) = made.model(pictures[0], views[0])["donors"]
    assert row["lent_to"] == {"consumer": 2 * GIB, "h2": GIB}
    assert row["segments"]["lent"] == 3 * GIB
    assert row["segments"]["pool"] == GIB


def test_a_host_that_answers_no_longer_keeps_its_figures_with_their_age() -> None:
    pictures, views = looked([donor(SUN)], [silent(SUN)], [silent(SUN)])
    (row,) = made.model(pictures[2], views[2])["donors"]
    assert (row["name"], row["answers"], row["age_s"]) == ("sun", False, 4.0)
    assert row["segments"]["own"] > 0
    (row,) = made.model(*_one([silent(SUN)]))["donors"]
    assert (row["name"], row["age_s"]) == (str(SUN), None)
    assert "segments" not in row


def _one(donors: list[AskedDonor]) -> tuple[Picture, dict[str, made.DeviceView]]:
    pictures, views = looked(donors)
    return pictures[0], views[0]


# ------------------------------------------------------------------------------ cells


def test_a_slab_is_where_a_donor_says_it_is_and_as_hot_as_its_device_says() -> None:
    picture, views = _one(
        [
            donor(SUN, lease(slabs=[[0, 12.5], [3, None]], device=device())),
            donor(MOON, lease(slabs=[[1, 0.0]])),
        ]
    )
    assert cells(picture, views) == [[0, [0], 12.5], [1, [1], 0.0], [3, [0], None]]
    (row,) = made.model(picture, views)["devices"]
    assert (row["slabs"], row["size_bytes"], row["far_bytes"]) == (4, 4 * GIB, 0)


def test_far_memory_of_a_device_is_shown() -> None:
    picture, views = _one([donor(SUN, lease(device=device(far_bytes=GIB)))])
    (row,) = made.model(picture, views)["devices"]
    assert row["far_bytes"] == GIB


def test_a_migration_is_seen_and_told() -> None:
    begun = [donor(SUN, lease(slabs=[[0, 1.0]])), donor(MOON)]
    under_way = [donor(SUN, lease(slabs=[[0, 1.0]])), donor(MOON, lease(slabs=[[0, None]]))]
    ended = [donor(SUN), donor(MOON, lease(slabs=[[0, 2.0]]))]
    pictures, views = looked(begun, under_way, ended)
    assert cells(pictures[1], views[1]) == [[0, [0, 1], 1.0]]
    said = [change.text for change in made.slab_changes(views[0], views[1], NAMES)]
    assert said == ["device swap0 of consumer: slab 0 is being moved to moon"]
    said = [change.text for change in made.slab_changes(views[1], views[2], NAMES)]
    assert said == ["device swap0 of consumer: slab 0 is on moon, and has left sun"]


def test_a_slab_that_is_given_back_is_told() -> None:
    """Whether it was taken, the donor tells."""
    _, views = looked(
        [donor(SUN, lease(slabs=[[0, 1.0], [1, 1.0]]))], [donor(SUN, lease(slabs=[[1, 1.0]]))]
    )
    (change,) = made.slab_changes(views[0], views[1], NAMES)
    assert change.text == "device swap0 of consumer: slab 0 has left sun, and has no donor now"
    assert change.tone == ""


def test_slabs_of_a_dead_donor_stay_until_its_device_gives_them_up() -> None:
    """As long as the device waits for the donor, or nobody can say what it does."""
    alive = [
        donor(SUN, lease(slabs=[[0, 1.0]])),
        donor(MOON, lease(slabs=[[1, 1.0]], device=device())),
    ]
    dead = [silent(SUN), donor(MOON, lease(slabs=[[1, 1.0]], device=device(suspended=1)))]
    given_up = [silent(SUN), donor(MOON, lease(slabs=[[1, 1.0]], device=device()))]
    moved = [silent(SUN), donor(MOON, lease(slabs=[[0, None], [1, 1.0]], device=device()))]
    alone = [silent(SUN), silent(MOON)]
    pictures, views = looked(alive, dead, given_up, moved, alone)
    assert cells(pictures[1], views[1]) == [[0, [0], 1.0], [1, [1], 1.0]]
    assert cells(pictures[2], views[2]) == [[1, [1], 1.0]]
    assert cells(pictures[3], views[3]) == [[0, [1], None], [1, [1], 1.0]]
    (row,) = made.model(pictures[4], views[4])["devices"]
    assert not row["fresh"]
    said = [change.text for change in made.slab_changes(views[0], views[1], NAMES)]
    assert said == ["device swap0 of consumer: 1 slab cannot be reached"]


def test_an_expired_lease_is_no_device() -> None:
    picture, views = _one([donor(SUN, lease(state="expired", slabs=[[0, 1.0]]))])
    assert made.model(picture, views)["devices"] == []


# ------------------------------------------------------------------------------ rates


def test_rates_are_differences_over_the_devices_own_time() -> None:
    """However late a donor asked it."""
    _, views = looked(
        [donor(SUN, lease(device=device()))],
        [donor(SUN, lease(device=device(uptime_s=14.0, in_donors_pages=400, out_pages=40)))],
        [donor(SUN, lease(device=device(uptime_s=14.0, in_donors_pages=400, out_pages=40)))],
        [donor(SUN, lease(device=device(uptime_s=1.0, in_donors_pages=9)))],
    )
    assert views[0][DEVICE].rates is None
    assert views[1][DEVICE].rates == made.Rates(100.0, 0.0, 10.0)
    assert views[2][DEVICE].rates == made.Rates(100.0, 0.0, 10.0)  # nothing new was said
    assert views[3][DEVICE].rates is None  # another process


def test_the_latest_of_what_several_donors_tell_counts() -> None:
    older, newer = device(uptime_s=10.0, alarms=0), device(uptime_s=11.0, alarms=2)
    for first, second in ((older, newer), (newer, older)):
        _, views = _one([donor(SUN, lease(device=first)), donor(MOON, lease(device=second))])
        figures = views[DEVICE].figures
        assert figures is not None
        assert figures.alarms == 2


# ------------------------------------------------------------------------------ sizes


def test_a_model_of_a_large_cluster_stays_bounded() -> None:
    donors = []
    for number in range(made.DONORS_MAX + 10):
        leases = [
            lease(
                device_id=f"00000000-0000-0000-0000-{number:012x}",
                slabs=[[slab, 123456.7] for slab in range(200)],
                job="j" * 128,
                user="u" * 128,
                host_name="h" * 128,
                device_name="d" * 128,
                device=device(),
            )
        ]
        said = status(leases=leases, donor_name="n" * 128)
        address = HostPort("10.0.0.1", number + 1)
        donors.append(AskedDonor(address, msgspec.convert(said, m.Status), ""))
    picture, views = _one(donors)
    model = made.model(picture, views)
    assert (model["donors_left_out"], model["devices_left_out"]) == (10, 10)
    assert sum(len(row["cells"]) for row in model["devices"]) == made.CELLS_MAX
    assert sum(row["cells_left_out"] for row in model["devices"]) == (
        200 * made.DEVICES_MAX - made.CELLS_MAX
    )
    assert len(msgspec.json.encode(model)) < 1 << 20


def test_many_slabs_that_change_at_once_are_a_few_events() -> None:
    many = [[slab, 1.0] for slab in range(1000)]
    _, views = looked([donor(SUN, lease(slabs=many))], [donor(SUN, lease())])
    changes = made.slab_changes(views[0], views[1], NAMES)
    assert len(changes) < 20
    assert changes[-1].text == "and 988 more slabs"


def test_a_sample_is_of_all_devices_that_somebody_tells_of() -> None:
    rows = [
        {"fresh": True, "in_donors_per_s": 10.0, "in_disk_per_s": None, "out_per_s": 1.0,
         "page_in_us_p50": 5.0, "page_in_us_p99": None},
        {"fresh": True, "in_donors_per_s": 5.5, "in_disk_per_s": None, "out_per_s": 2.0,
         "page_in_us_p50": 7.0, "page_in_us_p99": None},
        {"fresh": False, "in_donors_per_s": 99.0, "in_disk_per_s": 99.0, "out_per_s": 99.0,
         "page_in_us_p50": 99.0, "page_in_us_p99": 99.0},
    ]  # fmt: skip
    assert made.sample({"devices": rows}, 1000.0) == {
        "at_s": 1000.0,
        "in_donors_per_s": 15.5,
        "in_disk_per_s": None,
        "out_per_s": 3.0,
        "page_in_us_p50": 7.0,
        "page_in_us_p99": None,
    }
