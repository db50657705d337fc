/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front end far: the large memory of a job's processes, by blocks of 2 MiB, over rings in
 * shared memory (csrc/far/ring.h).
 *
 * Rules, each with its test in tests/c/test_far.c:
 *  F1  A client's userfaultfd is closed only after its process has ended, or its memory: else pages
 *      that are absent would become zeros.
 *  F5  A read of a page that no source will ever have is -ENODATA. That is known of a page that no
 *      donor and no backup has, and of one whose every source was read twice and gave other bytes
 *      than were written (or whose backup's medium has lost them). All else is -EIO, which waits:
 *      a donor that is away, a disk that does not answer. Larger reads are -EIO in both cases.
 *  F10 No client is waited for: not for a lock that it holds, a bell that it can make blocking, or
 *      the end of a descriptor that it gave (a thread of its own closes those).
 *  F17 This process makes, sizes, seals and populates every ring, a bounded number of them, and
 *      gives its memory back at its end, whoever else has it mapped. A client that punches holes
 *      into its ring reads zeros there; what is put there next is charged to who puts it.
 *  F18 Each word of a request is read once, then checked. A request reaches the blocks of its own
 *      client only; a place changes hands when nothing uses it and its pages were discarded.
 *  F19 The bytes of a write are read once, by the cipher. Those of a read arrive in memory of this
 *      process and are opened from there into the ring, of which nothing is read: a client that
 *      scribbles there harms nobody, and no donor is blamed.
 *  F20 A client is who sent the hello, as the kernel says. Its end is its process's (pidfd), or its
 *      memory's, as after an exec. Then nothing more is taken from its ring; when the requests
 *      under way have ended its blocks are discarded, and after that they are free. A client whose
 *      socket ended while its memory lives keeps its blocks, and may come back for a new ring.
 *  F21 A successor gives every client a new ring. An answer goes to the ring that asked.
 *  F22 At most ISWI_FAR_REQUESTS_MAX requests are under way, ISWI_FAR_READS_MAX of them reads.
 *  F24 A job's end empties whole slabs: see far_table.h.
 *  F25 info.connections says how many clients there are: who would stop the device asks it first.
 *      destroy ends what is under way, as every front end does (a donor that stalls has a
 * deadline), and closes the clients' sockets; their blocks stay in the table for a successor.
 */
#ifndef ISWI_FAR_H
#define ISWI_FAR_H

#include "frontend/far_table.h"
#include "frontend/frontend.h"

/* Jobs at once. One that has no process here finds a place for its first, whatever others have. */
#define ISWI_FAR_JOBS_MAX 16u
/*
 * Numbers for the blocks of each client, in blocks of the range: allocators reserve far more
 * addresses than they use. A number takes 4 bytes of this process, whether it is used or not.
 */
#define ISWI_FAR_NUMBERS_TIMES 16u
#define ISWI_FAR_NUMBERS_MIN   (1u << 15) /* 64 GiB */
#define ISWI_FAR_NUMBERS_MAX   (1u << 21) /* 4 TiB */
/* Of the rings, and one for each client's discards after its end. */
#define ISWI_FAR_REQUESTS_MAX (ISWI_FAR_CLIENTS_MAX * (ISWF_SLOTS + 1))

extern const struct iswi_frontend_ops iswi_far_ops;

#endif
