# SPDX-License-Identifier: Apache-2.0
"""A cluster in virtual time: hosts, jobs and failures around the very policies of the daemons.

Only the command line enters this room. It starts no program, reads no clock and draws nothing at
random except from its seed: one scenario and one seed have one result.
"""
