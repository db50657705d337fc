/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who has which block of a device's far range. The table lies in a file in memory that outlives the
 * process (the holder keeps it), so a successor knows every client and its blocks.
 *
 * An agent names blocks by numbers of its own, of which there are more than blocks: programs
 * reserve addresses that they never use, and a number has no place before its first write. A place
 * is where the bytes are: the far range's block of that index. It has one owner, or none. It
 * changes hands only when no request uses it and its pages were discarded, so no client ever reads
 * what another one wrote.
 *
 * Places are given lowest first in a slab of the same job's, then in a slab of nobody's, then in
 * any; and in slabs that are mapped before others. So a job's end empties whole slabs (F24).
 *
 * The process may be killed after each store to the file. So `magic` is stored last of all, a
 * client's `used` and a block's `owner` after the rest of it, and both are cleared first. A client
 * is used as long as a block has it for an owner. A file that says anything else is damaged.
 */
#ifndef ISWI_FAR_TABLE_H
#define ISWI_FAR_TABLE_H

#include <sys/types.h>

#include "far/ring.h"
#include "isw.h"
#include "util/util.h"

#define ISWI_FAR_CLIENTS_MAX 8u
#define ISWI_FAR_NONE        UINT32_MAX

/* In the file. */
struct iswi_far_kept_client {
	atomic_uint used;
	int32_t pid;
	uint64_t started; /* of that process, in clock ticks since boot: pids are used again */
	uint64_t job;     /* inode number of the job's socket, which lives as long as the job */
	uint8_t token[ISWF_TOKEN_BYTES];
};

struct iswi_far_kept_block {
	atomic_uint owner; /* client's index + 1; 0: nobody's */
	uint32_t number;
};

struct iswi_far_kept {
	atomic_uint magic; /* 0: new */
	uint32_t blocks;
	struct isw_far_told told; /* of clients that ended, and of processes that never were one */
	struct iswi_far_kept_client clients[ISWI_FAR_CLIENTS_MAX];
	struct iswi_far_kept_block block[];
};

/* Where the far range lies. */
struct iswi_far_layout {
	uint32_t blocks;
	uint32_t numbers; /* a client's numbers of blocks are below this; not fewer than blocks */
	uint64_t offset;  /* in the device, bytes */
	uint64_t slab_bytes;
	bool (*is_mapped)(const void *ctx, uint32_t slab); /* of the device's slabs; never waits */
	const void *ctx;
};

/* A part of the far range that is one slab's. */
struct iswi_far_slab {
	uint64_t job; /* whose blocks came first; 0: it has none */
	uint32_t used;
};

struct iswi_far_table {
	struct iswi_far_layout layout;
	struct iswi_far_kept *kept;
	size_t bytes;
	pthread_mutex_t lock; /* a leaf: the rest */
	uint32_t used, slabs;
	struct iswi_far_slab *slab;
	uint32_t *place[ISWI_FAR_CLIENTS_MAX]; /* by number; ISWI_FAR_NONE */
	uint16_t *uses;                        /* by place: requests under way */
	bool *going;                           /* by place: being discarded as a whole */
};

/*
 * Maps the file; sizes an empty one. *is_new: it says nothing yet, and only
 * iswi_far_table_begin makes it count; until then another start finds a new file again. Control
 * thread. 0 or -errno: -EINVAL: of another device, -EUCLEAN: damaged.
 */
int iswi_far_table_open(struct iswi_far_table *table, int fd, const struct iswi_far_layout *layout,
			bool *is_new, struct isw_error *error);
void iswi_far_table_begin(struct iswi_far_table *table);
void iswi_far_table_close(struct iswi_far_table *table);

/* Any thread, none waits for more than the lock. */
/* A use of the block's place, made if `make`. 0, -ENOENT, -ENOSPC, -EINVAL (it is going). */
int iswi_far_place_get(struct iswi_far_table *table, uint32_t client, uint32_t number, bool make,
		       uint32_t *place_out);
void iswi_far_place_put(struct iswi_far_table *table, uint32_t place);
/* From a use to the only one: nobody gets another. -EINVAL: others use it; the use stays. */
int iswi_far_place_close(struct iswi_far_table *table, uint32_t place);
/* Puts that use. discarded: the place is free; else its owner keeps it. */
void iswi_far_place_left(struct iswi_far_table *table, uint32_t place, bool discarded);
/* A place of a client that has no requests under way, from `from` on: closed, with a use. */
uint32_t iswi_far_place_next(struct iswi_far_table *table, uint32_t client, uint32_t from);
uint32_t iswi_far_places_used(struct iswi_far_table *table);

#endif
