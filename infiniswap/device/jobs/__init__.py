# SPDX-License-Identifier: Apache-2.0
"""The job of `infiniswap run`: its process and terminal, what it uses, and the runs beside it.

Commands enter; nothing here runs in the device process.
"""
