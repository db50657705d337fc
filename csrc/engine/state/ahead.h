/* SPDX-License-Identifier: Apache-2.0 */
/* Pages read ahead: where they are, who waits for them, and what outdates them (R14, R15). */
#ifndef ISWI_STATE_AHEAD_H
#define ISWI_STATE_AHEAD_H

#include "engine/state/page.h"
#include "engine/state/trend.h"

#define ISWI_AHEAD_STREAMS 16u
/* Of pages, for all streams: one that is read at full depth has three. */
#define ISWI_AHEAD_GROUPS      20u
#define ISWI_AHEAD_GROUP_BYTES (ISWI_GROUP_PAGES * ISW_PAGE_BYTES)
/* Requests, or parts of one, that may wait for a group that is being read. */
#define ISWI_AHEAD_WAITS 8u
/* Credit at first, what a page that is read takes of it, and what one that is asked for gives. */
#define ISWI_AHEAD_CREDIT_FIRST 1024
#define ISWI_AHEAD_PAGE_TAKES   4
#define ISWI_AHEAD_PAGE_GIVES   5

/* Consecutive pages of a request that come with a group; they count as one of its pending. */
struct iswi_ahead_wait {
	struct iswi_req *req;
	uint64_t page;
	uint32_t pages;
};

/*
 * Pages of one group, which thus share a shard, that are being read or at rest. Under the lock of
 * the shard in whose list it is; while it is in none, and `listed` itself, by who has taken it.
 */
struct iswi_ahead_group {
	uint64_t group;
	uint32_t pages; /* a bit for each that may be had from here (R14) */
	uint32_t next;  /* in the shard's list */
	uint32_t waits_count;
	bool listed;
	bool reading; /* its bytes are on their way ... */
	bool slow;    /* ... and late: no request waits for them */
	bool taken;   /* from when it is given new pages until they are at rest; ahead.lock */
	struct iswi_ahead_wait waits[ISWI_AHEAD_WAITS];
	unsigned char *data; /* of the whole group */
};

struct iswi_ahead {
	pthread_mutex_t lock; /* streams, and which groups are taken; a leaf */
	struct iswi_stream streams[ISWI_AHEAD_STREAMS];
	uint32_t requests; /* counts them, around */
	uint32_t turn;     /* which group is next; the oldest */
	atomic_int credit; /* for pages to be read; relaxed */
	struct iswi_ahead_group groups[ISWI_AHEAD_GROUPS];
};

enum iswi_ahead_found {
	ISWI_AHEAD_NOT,
	ISWI_AHEAD_HAD,    /* the page's bytes are in the request */
	ISWI_AHEAD_JOINED, /* they will be, or the page is read in another way */
	ISWI_AHEAD_SLOW    /* its donor takes long to send it: the backup is asked */
};

/* All of these under the page's, or the group's, shard lock. */
enum iswi_ahead_found iswi_ahead_get(struct isw_engine *e, struct iswi_req *req, uint64_t page);
bool iswi_ahead_has(struct isw_engine *e, uint64_t page);
/* What was read ahead of this page is outdated. */
void iswi_ahead_drop(struct isw_engine *e, uint64_t page);
/* The group becomes one that is being read: of `number`, these pages. */
void iswi_ahead_list(struct isw_engine *e, struct iswi_ahead_group *g, uint64_t number,
		     uint32_t pages);
void iswi_ahead_unlist(struct isw_engine *e, struct iswi_ahead_group *g);
/* Takes all who wait for the group; returns how many. */
uint32_t iswi_ahead_release(struct iswi_ahead_group *g, struct iswi_ahead_wait *waits_out);
/*
 * The pages of a group that is at rest from now on go to who waits; `missing` gets a bit for each
 * page that such a wait did not get, counted from the group's first.
 */
uint32_t iswi_ahead_rest(struct iswi_ahead_group *g, struct iswi_ahead_wait *waits_out,
			 uint32_t *missing_out);

static inline uint32_t iswi_ahead_bit(uint64_t page)
{
	return 1u << page % ISWI_GROUP_PAGES;
}
static inline unsigned char *iswi_ahead_data(const struct iswi_ahead_group *g, uint64_t page)
{
	return g->data + page % ISWI_GROUP_PAGES * ISW_PAGE_BYTES;
}

#endif
