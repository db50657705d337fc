# SPDX-License-Identifier: Apache-2.0
"""`make bench-rdma`: our RDMA transport beside perftest, what mapping a slab costs with RDMA, and a
donor's processor time beside TCP."""
