# SPDX-License-Identifier: Apache-2.0
"""Which donors exist: lists of peers, and announcements on an MQTT broker.

Never what they can lend: placement asks the donors themselves. Devices, daemons and commands enter
by static.py, find.py, watcher.py and announcer.py; only listener_process.py and announcer.py load
MQTT.
"""
