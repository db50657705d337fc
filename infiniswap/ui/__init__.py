# SPDX-License-Identifier: Apache-2.0
"""The page that each daemon serves at /ui: the cluster as a map, live over a WebSocket.

`page` answers browsers, `browsers` and `links` decide which, `cluster_watch` asks donors while
somebody watches, `model` is what a browser gets. The daemon enters by `page`; nothing here changes
anything.
"""
