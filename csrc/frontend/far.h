/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front end far: the large memory of a job's processes, by blocks of 2 MiB, over rings in
 * shared memory (csrc/far/ring.h).
 *
 * Rules, each with its test in tests/c/test_far.c:
 *  F17 This process makes, sizes, seals and populates every ring, a bounded number of them.
 *  F18 Each word of a request is read once, then checked. A request reaches the blocks of its own
 *      client only; a place changes hands when nothing uses it and its pages were discarded.
 *  F19 The bytes of a write are read once, by the cipher. Those of a read arrive and are opened in
 *      memory of this process, and are copied to the ring last: a client that scribbles there harms
 *      nobody, and no donor is blamed.
 *  F20 A client's end is its process's (pidfd), or the end of its socket, as after an exec. Then
 *      nothing more is taken from its ring; when the requests under way have ended its blocks are
 *      discarded, and after that they are free.
 *  F21 A successor gives every client a new ring. An answer goes to the ring that asked.
 *  F10 No client is waited for.
 *  F22 At most ISWI_FAR_REQUESTS_MAX requests are under way, ISWI_FAR_READS_MAX of them reads.
 */
#ifndef ISWI_FAR_H
#define ISWI_FAR_H

#include "frontend/far_table.h"
#include "frontend/frontend.h"

/* Of the rings, and one for each client's discards after its end. */
#define ISWI_FAR_REQUESTS_MAX (ISWI_FAR_CLIENTS_MAX * (ISWF_SLOTS + 1))

extern const struct iswi_frontend_ops iswi_far_ops;

#endif
