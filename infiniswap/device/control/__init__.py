# SPDX-License-Identifier: Apache-2.0
"""What commands use to start a device process and to talk to one. Blocking; no event loop.

`launch` starts it, `client` asks it as root, `member` as a member of the group. Commands enter.
"""
