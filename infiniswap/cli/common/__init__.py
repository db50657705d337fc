# SPDX-License-Identifier: Apache-2.0
"""What several commands share: the parser, standard streams, declared devices. No command."""
