# SPDX-License-Identifier: Apache-2.0
"""Devices and donors in one process, with simulated time, network, disks and crashes.

What is real: the compiled engine (stepped), the device's mapper and links, the control protocol's
client, server and channels, the donor's service, lease table, evictor, drain and harvester. What is
simulated: the clock and the order of callbacks (`loop`), connections (`network`), the donor's
store (`store`) and when a transfer or a disk's job ends (`device`). `world` draws what happens
next from one seed and checks the invariants of docs/architecture.md after every step; `model` knows
only what was asked and answered.
"""
