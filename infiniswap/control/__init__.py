# SPDX-License-Identifier: Apache-2.0
"""The control API between consumers and donors: messages, authentication, server and client."""
