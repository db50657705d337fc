# SPDX-License-Identifier: Apache-2.0
"""Comparisons of Infiniswap with its floor, its peers and disks: `make bench`, `make bench-...`.

Every comparison runs us and the other side by turns in one run, round by round, because only the
ratio of two neighbours means something on a machine that does other things as well.

A room per suite (`peers`, `faults`, `frontends`, `rdma`), with a module per comparison; its SUITE
says which options it has, `suite` is their command line. The room `apps` has its own, as it goes on
for hours and can be resumed. `stats` and `results` are pure; `scope` names what a run makes and
takes it away again; `children` runs programs.
"""
