# SPDX-License-Identifier: Apache-2.0
"""Donors that a test drives: in this process, lying, hostile, or a store alone."""
