/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who has which block of a device's far range. The table lies in a file in memory that outlives the
 * process (the holder keeps it), so a successor knows every client and its blocks.
 *
 * An agent names blocks by numbers of its own; a place is where the bytes are: the far range's
 * block of that index. A place has one owner, or none. It changes hands only when no request uses
 * it and its pages were discarded, so no client ever reads what another one wrote.
 */
#ifndef ISWI_FAR_TABLE_H
#define ISWI_FAR_TABLE_H

#include <sys/types.h>

#include "far/ring.h"
#include "util/util.h"

#define ISWI_FAR_CLIENTS_MAX 8u
#define ISWI_FAR_NONE        UINT32_MAX

/* In the file. */
struct iswi_far_kept_client {
	uint32_t used;
	int32_t pid;
	uint64_t started; /* of that process, in clock ticks since boot: pids are used again */
	uint8_t token[ISWF_TOKEN_BYTES];
};

struct iswi_far_kept_block {
	/* Client's index + 1; 0: nobody's. Stored last when it is given, first when it is free. */
	atomic_uint owner;
	uint32_t number;
};

struct iswi_far_kept {
	uint32_t magic, blocks;
	struct iswi_far_kept_client clients[ISWI_FAR_CLIENTS_MAX];
	struct iswi_far_kept_block block[];
};

struct iswi_far_table {
	struct iswi_far_kept *kept;
	size_t bytes;
	pthread_mutex_t lock; /* a leaf: the rest */
	uint32_t blocks, free_from, used;
	uint32_t *place[ISWI_FAR_CLIENTS_MAX]; /* by number; ISWI_FAR_NONE */
	uint16_t *uses;                        /* by place: requests under way */
	bool *going;                           /* by place: being discarded as a whole */
};

/* Maps the file for so many blocks; sizes an empty one. Control thread. 0 or -errno. */
int iswi_far_table_open(struct iswi_far_table *table, int fd, uint32_t blocks,
			struct isw_error *error);
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
