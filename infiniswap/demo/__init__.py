# SPDX-License-Identifier: Apache-2.0
"""`infiniswap demo`: two donors, a device and a real job on this one machine.

`runner` is the order of events; `legs` runs the job once each way; `donors`, `volume` and `data`
make what the legs need; `leftovers` names everything that is made, and removes it; `results`
judges. The job, `job`, is a script of its own that imports nothing of Infiniswap.
"""
