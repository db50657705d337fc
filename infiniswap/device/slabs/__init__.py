# SPDX-License-Identifier: Apache-2.0
"""Which slab goes to which donor, when it moves and how it is filled.

`mapper` runs the control loop; `known_donors` has the links to the donors that `finder` finds,
`placer` asks them, `migration` moves slabs between them. The policies are in infiniswap.policy.
Only `process` enters.
"""
