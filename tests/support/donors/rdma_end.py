# SPDX-License-Identifier: Apache-2.0
"""An end of an RDMA connection as it is told over a session."""

from infiniswap.rdma_address import RdmaEnd

END = RdmaEnd(
    gid="00000000000000000000ffff7f000001",
    link=2,
    lid=0,
    mtu_bytes=4096,
    reads_max=16,
    number=17,
    psn=1,
)
