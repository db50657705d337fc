# SPDX-License-Identifier: Apache-2.0
"""How a host comes into a cluster: `token` names the inviting host and a password, `once` decides
who gets the invitation, `port` and `guest` are the two ends of the connection, `offer` and
`membership` what travels and where it lies afterwards. `infiniswap invite` and `join` enter."""
