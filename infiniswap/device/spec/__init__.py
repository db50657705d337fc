# SPDX-License-Identifier: Apache-2.0
"""What a device is, and where it is recorded. Every other room reads this.

`spec` holds everything a device process must know, `rundir` the paths of running and stopped
devices, `contents` what a stopped device keeps.
"""
