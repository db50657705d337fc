# SPDX-License-Identifier: Apache-2.0
"""The algorithms of the paper as plain objects: no I/O, no clock, no random source of their own.

Callers pass in the time (seconds of any monotonic clock) and a `random.Random`, so the daemons, the
tests and a simulator run the very same code.

Source of every formula and default: Gu, Lee, Zhang, Chowdhury, Shin: *Efficient Memory
Disaggregation with Infiniswap*, NSDI 2017 ("the paper" below).
"""
