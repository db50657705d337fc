# SPDX-License-Identifier: Apache-2.0
"""A consumer that has nothing of ours: pyverbs on Debian's own Python, for test_pyverbs.py.

    /usr/bin/python3 pyverbs_peer.py DEVICE ADDRESS

Each line of the input is a request, each line of the output its answer, both JSON. It does as it
is told, wrong or right. Completions are named as the verbs do, without IBV_WC_.
"""

from __future__ import annotations

import ipaddress
import json
import random
import sys
import time
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

PORT = 1
PAGE = 4096
WAIT_S = 120.0
ACK_TIMEOUT = 17  # half a second, and six times more: a guest is slow
RETRIES = 6

NAMES = ["SUCCESS", "REM_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_OP_ERR", "RETRY_EXC_ERR"]
NAMES += ["RNR_RETRY_EXC_ERR", "WR_FLUSH_ERR"]
STATUS = {getattr(e, f"IBV_WC_{name}"): name for name in NAMES}
OPCODES = {
    "read": e.IBV_WR_RDMA_READ,
    "write": e.IBV_WR_RDMA_WRITE,
    "write_with_imm": e.IBV_WR_RDMA_WRITE_WITH_IMM,
    "fetch_and_add": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
    "compare_and_swap": e.IBV_WR_ATOMIC_CMP_AND_SWP,
    "send": e.IBV_WR_SEND,
}


class Host:
    """The device, opened by its name, and the RoCE v2 GID of an address."""

    def __init__(self, device: str, address: str) -> None:
        self.context = Context(name=device)
        for entry in self.context.query_gid_table(64):
            raw = ipaddress.IPv6Address(entry.gid_str())
            if str(raw.ipv4_mapped or raw) == address and entry.gid_type == e.IBV_GID_TYPE_ROCE_V2:
                self.gid, self.gid_index = raw, entry.gid_index
                return
        raise SystemExit(f"{device} has no RoCE v2 GID of {address}")


class Connection:
    """A queue pair with a protection domain, a completion queue and a page of its own."""

    def __init__(self, host: Host, mtu_bytes: int) -> None:
        self.host = host
        self.mtu_bytes = mtu_bytes
        self.pd = PD(host.context)
        self.cq = CQ(host.context, 8)
        self.mr = MR(self.pd, PAGE, e.IBV_ACCESS_LOCAL_WRITE)
        cap = QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = QP(self.pd, init, QPAttr(port_num=PORT))
        self.psn = random.getrandbits(24)

    def end(self) -> dict[str, Any]:
        """What the donor must know, as the control session tells it (struct isw_rdma_end)."""
        return {
            "gid": self.host.gid.packed.hex(),
            "link": 2,
            "lid": 0,
            "mtu_bytes": self.mtu_bytes,
            "reads_max": 4,
            "number": self.qp.qp_num,
            "psn": self.psn,
        }

    def connect(self, end: dict[str, Any]) -> None:
        """To the donor's."""
        gid = GID(str(ipaddress.IPv6Address(bytes.fromhex(end["gid"])).exploded))
        route = GlobalRoute(dgid=gid, sgid_index=self.host.gid_index, hop_limit=8)
        attr = QPAttr(port_num=PORT)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        mtu_bytes = min(end["mtu_bytes"], self.mtu_bytes)
        attr.path_mtu = (mtu_bytes // 128).bit_length() - 1
        attr.dest_qp_num = end["number"]
        attr.rq_psn = end["psn"]
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 4
        attr.min_rnr_timer = 12
        self.qp.to_rtr(attr)
        attr.timeout = ACK_TIMEOUT
        attr.retry_cnt = RETRIES
        attr.rnr_retry = 3
        attr.sq_psn = self.psn
        self.qp.to_rts(attr)

    def transfer(
        self, kind: str, address: int, rkey: int, length: int, data: bytes
    ) -> dict[str, str]:
        """Its completion, and what is in our page then."""
        if data:
            self.mr.write(data, len(data))
        sge = SGE(self.mr.buf, length, self.mr.lkey)
        request = SendWR(opcode=OPCODES[kind], num_sge=1, sg=[sge])
        if kind in ("fetch_and_add", "compare_and_swap"):
            request.set_wr_atomic(rkey, address, 0, 1)
        elif kind != "send":
            request.set_wr_rdma(rkey, address)
        self.qp.post_send(request)
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            count, done = self.cq.poll(1)
            if count:
                status = STATUS.get(done[0].status, str(done[0].status))
                return {"status": status, "data": self.mr.read(length, 0).hex()}
            time.sleep(0.001)
        return {"status": "nothing", "data": ""}

    def close(self) -> None:
        """Children first."""
        for item in (self.qp, self.mr, self.cq, self.pd):
            item.close()


def answer(
    host: Host, connections: dict[str, Connection], request: dict[str, Any]
) -> dict[str, Any]:
    """Of one request; an error is an answer, too."""
    do, name = request["do"], request.get("name", "")
    if do == "make":
        connections[name] = Connection(host, request["mtu_bytes"])
        return connections[name].end()
    if do == "connect":
        connections[name].connect(request["end"])
        return {}
    if do == "close":
        connections.pop(name).close()
        return {}
    data = bytes.fromhex(request["data"])
    where = request["address"], request["rkey"], request["length"]
    return connections[name].transfer(do, *where, data)


def main() -> None:
    """Until the end of the input."""
    host = Host(*sys.argv[1:3])
    connections: dict[str, Connection] = {}
    for line in sys.stdin:
        print(json.dumps(answer(host, connections, json.loads(line))), flush=True)
    for connection in connections.values():
        connection.close()
    host.context.close()


main()
