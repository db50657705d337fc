# SPDX-License-Identifier: Apache-2.0
"""`make bench-frontends`: the kernel's ways to a device beside each other, and what the death of
the process behind them costs."""
