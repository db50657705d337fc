# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a device now, in sentences that `status` shows until it is over."""

from __future__ import annotations

import logging

from infiniswap import events

log = logging.getLogger(__name__)


class Alarms(dict[str, str]):
    """Sentences by a name that only the code knows. The code that raises one removes it.

    infiniswap.remedies knows their words and has the remedy.
    """

    def sound(self, name: str, sentence: str, event: events.Event, *, donor: object = "") -> None:
        """Raises an alarm, or gives it other words, and logs it as an error.

        Args:
            name: of the alarm.
            sentence: for people.
            event, donor: for programs that read the log (infiniswap.events).
        """
        self[name] = sentence
        log.error("%s", sentence, extra=events.about(event, donor=donor))
