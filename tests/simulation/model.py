# SPDX-License-Identifier: Apache-2.0
"""What a page may contain, by what was asked and what was answered; nothing else is known here."""

from __future__ import annotations

from dataclasses import dataclass, field

from infiniswap.units import PAGE_BYTES

NEVER = float("inf")


def page_bytes(value: int) -> bytes:
    """The bytes of a page that holds a value; 0: zeros."""
    return value.to_bytes(8, "little") * (PAGE_BYTES // 8)


@dataclass(slots=True)
class Version:
    """One write of a page."""

    value: int
    submitted: float
    completed: float = NEVER


@dataclass(slots=True)
class Pages:
    """All pages of a device. Times are any numbers that grow with every event."""

    count: int
    versions: list[list[Version]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = [[Version(0, -1.0, 0.0)] for _ in range(self.count)]

    def written(self, page: int, value: int, now: float) -> Version:
        """A write has been submitted."""
        version = Version(value, now)
        self.versions[page].append(version)
        return version

    def may_read(self, page: int, value: int, since: float) -> bool:
        """Whether a read that was submitted then may return the value.

        It may when no version that was written wholly after it was complete before the read began.
        """
        versions = self.versions[page]
        return any(
            version.value == value
            and not any(
                later.submitted > version.completed and later.completed < since
                for later in versions
            )
            for version in versions
        )

    def wrong(self, first: int, data: bytes, since: float) -> str:
        """What is wrong with the bytes of a read; "" when nothing is."""
        for number in range(len(data) // PAGE_BYTES):
            page = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            value = int.from_bytes(page[:8], "little")
            if page != page_bytes(value):
                return f"page {first + number} is torn"
            if not self.may_read(first + number, value, since):
                known = [(v.value, v.submitted, v.completed) for v in self.versions[first + number]]
                return f"page {first + number} holds {value}, read since {since}, of {known}"
        return ""
