# SPDX-License-Identifier: Apache-2.0
"""What a device does while a run uses it, from what it tells about once a second.

A device's process counts from zero. When another one takes over, what the former one had counted
until it was last asked is kept here.
"""

from __future__ import annotations

from infiniswap.device.api import DeviceStatus, DonorRow

_AWAY = "suspended"


class Account:
    """Of one run.

    Args:
        before: what the device told before the job began.

    Attributes:
        counts: how much each of the device's counters (`DeviceStatus.stats`) has grown.
        far_counts: of far memory, see FarRow; its device has this run alone.
        donors_gone: why, by address, of donors that were gone for some time.
        alarms: every one that the device has raised, those from before the job too.
        donors_bytes_max: the most that donors held for the device.
        far_bytes: memory that is away now; `far_bytes_max`: the most.
        far_pauses: far memory left the job to swap a second ago (csrc/far/pause.c).
        far_processes_max: the most processes that had far memory at once.
        far_problem: why far memory was not served for some time; empty: it was.
    """

    def __init__(self, before: DeviceStatus) -> None:
        self.counts = dict.fromkeys(before.stats, 0)
        self.donors_gone: dict[str, str] = {}
        self.alarms: list[str] = []
        self.donors_bytes_max = 0
        self.far_bytes = self.far_bytes_max = self.far_processes_max = 0
        self.far_problem = ""
        self.far_pauses = False
        self.far_counts: dict[str, int] = {}
        self._before = self._last = before
        self._gone_now: set[str] = set()

    @property
    def take_overs(self) -> int:
        """How often another process has taken over."""
        return _take_overs(self._last) - _take_overs(self._before)

    @property
    def remote_share(self) -> float | None:
        """Of what was paged in and not zeros, what donors served; None: no such."""
        remote, *others = (
            self.counts.get(f"pages_in_{source}", 0) for source in ("remote", "staging", "backup")
        )
        served = remote + sum(others)
        return remote / served if served else None

    def add(self, status: DeviceStatus) -> list[str]:
        """Takes in what the device tells now; returns what a user should hear of it at once."""
        is_same = (status.pid, _take_overs(status)) == (self._last.pid, _take_overs(self._last))
        last = self._last if is_same else None
        for name, value in status.stats.items():
            counted = last.stats.get(name, 0) if last else 0
            self.counts[name] = self.counts.get(name, 0) + value - counted
        rows = {row.address: row for row in last.donors} if last else {}
        news = [self._donor_news(row, rows.get(row.address), status) for row in status.donors]
        self._last = status
        held_bytes = sum(row.slabs for row in status.donors) * status.slab_bytes
        self.donors_bytes_max = max(self.donors_bytes_max, held_bytes)
        if (far := status.far) is not None:
            # These go on over a take-over, and are less until all processes have come back.
            paused_ns = self.far_counts.get("pause_ns", 0)
            self.far_pauses = far.counts.get("pause_ns", 0) > paused_ns
            for name, value in far.counts.items():
                self.far_counts[name] = max(self.far_counts.get(name, 0), value)
            self.far_bytes = far.away_bytes
            self.far_bytes_max = max(self.far_bytes_max, self.far_bytes)
            self.far_processes_max = max(self.far_processes_max, far.processes)
            self.far_problem = self.far_problem or far.problem
        alarms = [alarm for alarm in status.alarms if alarm not in self.alarms]
        self.alarms += alarms
        return [line for line in news if line] + [f"warning: {alarm}" for alarm in alarms]

    def _donor_news(self, row: DonorRow, last: DonorRow | None, status: DeviceStatus) -> str:
        """A line when a donor goes and when it is back, else nothing.

        One that is away for a moment, or has to be reclaimed by a new process, has not gone.
        """
        was_away = last is not None and last.state == _AWAY
        was_given_up = row.given_up > (last.given_up if last else 0)
        name = f"donor {row.address}" + (f" ({row.name})" if row.name else "")
        if was_given_up or (was_away and row.state == _AWAY):
            why = _first_sentence(row.detail.removeprefix(f"donor {row.address}: ")) or "no answer"
            self.donors_gone.setdefault(row.address, why)
            if row.address in self._gone_now:
                return ""
            self._gone_now.add(row.address)
            if status.backup is None:
                return f"{name} is gone: {why}. There is no backup of the pages that it held."
            return f"{name} is gone: {why}. The pages that it held are read from the local disk."
        if row.address in self._gone_now and row.state == "mapped":
            self._gone_now.remove(row.address)
            return f"{name} is back and holds pages again"
        return ""


def _first_sentence(text: str) -> str:
    """What happened, without the remedy: that is in the device's log and status."""
    return text.partition(". ")[0].rstrip(".")


def _take_overs(status: DeviceStatus) -> int:
    return 0 if status.succession is None else status.succession.take_overs
