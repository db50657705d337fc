# SPDX-License-Identifier: Apache-2.0
"""Which slab goes to which donor, when it moves and how it is filled.

`mapper` runs the control loop over the policies of infiniswap.policy; `finder` tells it who exists.
Only `process` enters.
"""
