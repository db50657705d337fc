# SPDX-License-Identifier: Apache-2.0
"""Routes of the control port for browsers: the page /ui, and the link that lets one in."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from infiniswap.control import messages as m
from infiniswap.control.admission import Admission
from infiniswap.control.http import web
from infiniswap.control.port import HttpPort, json_answer
from infiniswap.control.scrape import READERS
from infiniswap.control.service import Admitted, Page, Service

log = logging.getLogger(__name__)


def add_page(port: HttpPort, page: Page, admission: Admission, counters: Counter[str]) -> None:
    """Adds the page's own routes.

    Args:
        port: that serves them.
        page: answers.
        admission: goes by certificates, where the cluster has them.
        counters: gets `certificates_refused`.
    """

    async def live(request: web.Request) -> web.StreamResponse:
        admitted = Admitted()
        if admission.tls.cluster:
            try:
                admission.admit(request.transport, READERS, time.time())
                admitted = Admitted(is_proved=True)
            except ValueError as error:
                counters["certificates_refused"] += 1
                admitted = Admitted(why=str(error))
        return await page.live(request, admitted, lambda: port.proved(request))

    port.page_paths = (f"{m.PAGE_PATH}/",)
    port.router.add_get(m.PAGE_PATH, page.moved)
    port.router.add_get(f"{m.PAGE_PATH}/live", live)
    port.router.add_get(f"{m.PAGE_PATH}/{{name:[a-z.]*}}", page.file)


def new_link(page: Page, service: Service, digest: bytes) -> Callable[[], Awaitable[web.Response]]:
    """Answers with a link; who asks has proved who it is.

    Args:
        page: that the link is for.
        service: whose page it is.
        digest: of the certificate that browsers see.
    """

    async def link() -> web.Response:
        text, valid_s = page.make_link()
        status = service.status()
        log.info("a link to the page was made")
        return json_answer(
            m.PageLink(
                donor_id=status.donor_id,
                donor_name=status.donor_name,
                link=text,
                valid_s=valid_s,
                certificate=digest.hex(),
            )
        )

    return link
