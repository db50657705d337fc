# SPDX-License-Identifier: Apache-2.0
"""What the views show, asked of donors by the control API: `status`, `top`, and the page.

`asking` asks; everything else is pure. Commands and the daemon's page enter; nothing here draws.
"""
