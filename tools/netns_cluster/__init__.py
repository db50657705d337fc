# SPDX-License-Identifier: Apache-2.0
"""A cluster on one machine, for tests and for trying things out (docs/cluster.md).

Each host is a network namespace on a bridge and a memory cgroup, with a daemon that reads that
cgroup's figures. `plan` is what is to be, `record` and `leftovers` know what there is, `network`
and `memory` make it, `cluster` does what can be done to it, `cli` is the command
`tools/netns-cluster`.
"""
