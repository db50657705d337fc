# SPDX-License-Identifier: Apache-2.0
"""What faults cost, in the shape of the paper's evaluation: `make bench-faults`.

Each comparison runs the same job without and with the fault by turns. `timeline` is pure; `donors`
and `consumer` are both ends of the memory; `evicting_donor` and `timed_device` are the product's
own processes with one thing more each: they do, or time, what nobody else can ask for.
"""
