/* SPDX-License-Identifier: Apache-2.0 */
/* State of single pages: the sharded in-flight table, and the bits. All under the page's shard
 * lock. */
#ifndef ISWI_STATE_PAGE_H
#define ISWI_STATE_PAGE_H

#include "engine/state/arena.h"
#include "engine/state/engine.h"

/* Pages of one group share a shard lock and one word of each bitmap. */
#define ISWI_GROUP_PAGES    32u
#define ISWI_SHARDS         64u
#define ISWI_HASH_PER_SHARD 1024u

/* What only the running process knows of a staging buffer. Under its page's shard lock. */
struct iswi_slot_use {
	struct iswi_req *req; /* not yet told that this page is safe */
	uint32_t older;       /* next slot of the same page, ISWI_NONE at the end */
	uint16_t refs;        /* transfers that read from the buffer */
	/* Of a copy or hedged read; of far memory. Staging lock when taken and given back. */
	bool copy, far;
};

enum iswi_backup_state {
	ISWI_B_IDLE,
	ISWI_B_QUEUED, /* in the queue */
	ISWI_B_BUSY,   /* being written */
	ISWI_B_FAILED  /* in the list of those to retry */
};

/* A page with a write or copy in flight or staged. Lives while it has a slot or a transfer. */
struct iswi_entry {
	uint64_t page;
	uint32_t hash_next;
	uint32_t newest;  /* slot list, newest first; its head may be older than version (zeroed) */
	uint32_t version; /* 0: not written since a copy made the entry */
	uint32_t backup_prev, backup_next; /* queue or failed list; backup lock */
	uint8_t backup_state;
	uint8_t flush_epoch; /* which epoch counts this page while it is not IDLE */
	uint8_t again_epoch; /* while BUSY: the epoch of the first newer version */
	bool backup_ailing;  /* backup lock */
	bool remote_busy;
	bool remote_wanted; /* newer data waits for the write in flight */
	bool copying;       /* a copy is being read; its buffer is not in the slot list yet */
};

struct iswi_shard {
	pthread_mutex_t lock;
	uint32_t entries;
	uint32_t ahead; /* list of groups that are read ahead */
	uint32_t hash[ISWI_HASH_PER_SHARD];
} __attribute__((aligned(64)));

static inline struct iswi_shard *iswi_shard_of(const struct isw_engine *e, uint64_t page)
{
	return &e->shards[page / ISWI_GROUP_PAGES % ISWI_SHARDS];
}
struct iswi_entry *iswi_entry_find(struct isw_engine *e, uint64_t page);
struct iswi_entry *iswi_entry_make(struct isw_engine *e, uint64_t page);
/* The slot that holds the newest version, or ISWI_NONE. */
uint32_t iswi_entry_newest(const struct isw_engine *e, const struct iswi_entry *entry);
/*
 * Tells the requests that wait for versions up to `version`; those then complete are put on
 * *done_list (through next), to be finished without the lock.
 */
void iswi_entry_safe(struct isw_engine *e, struct iswi_entry *entry, uint32_t version,
		     struct iswi_req **done_list);
/* The descriptor of a version that is superseded, zeroed or safe elsewhere (R9, R10). */
static inline void iswi_slot_clear(struct isw_engine *e, uint32_t slot)
{
	if (iswi_kept64(&e->slots[slot].page) != ISWI_NO_PAGE)
		iswi_keep64(&e->slots[slot].page, ISWI_NO_PAGE);
}
/* Gives back what is no longer needed; returns how many staging buffers it gave back. */
uint32_t iswi_entry_collect(struct isw_engine *e, struct iswi_entry *entry);

/* Where the pages of one group end that `page` is in, or before, at `end`. */
static inline uint64_t iswi_group_end(uint64_t page, uint64_t end)
{
	return ISWI_MIN((page / ISWI_GROUP_PAGES + 1) * ISWI_GROUP_PAGES, end);
}
static inline bool iswi_bit(const atomic_uint *bits, uint64_t page)
{
	return iswi_kept32(&bits[page / ISWI_GROUP_PAGES]) >> (page % ISWI_GROUP_PAGES) & 1;
}
static inline void iswi_bit_set(atomic_uint *bits, uint64_t page)
{
	atomic_uint *word = &bits[page / ISWI_GROUP_PAGES];

	iswi_keep32(word, iswi_kept32(word) | 1u << page % ISWI_GROUP_PAGES);
}
static inline void iswi_bit_clear(atomic_uint *bits, uint64_t page)
{
	atomic_uint *word = &bits[page / ISWI_GROUP_PAGES];

	iswi_keep32(word, iswi_kept32(word) & ~(1u << page % ISWI_GROUP_PAGES));
}
/*
 * Without a backup backup_current means "lost": the last copy of the page is gone, and reading it
 * is an error, never zeros.
 */
static inline void iswi_lost_set(struct isw_engine *e, uint64_t page)
{
	iswi_bit_set(e->backup_current, page);
}
static inline uint32_t iswi_place_at(const struct isw_engine *e, uint64_t page)
{
	return iswi_bit(e->at_place, page);
}
void iswi_remote_valid_set(struct isw_engine *e, uint64_t page, uint32_t place);
void iswi_remote_valid_clear(struct isw_engine *e, uint64_t page);
static inline void iswi_backup_current_set(struct isw_engine *e, uint64_t page)
{
	iswi_bit_set(e->backup_current, page);
}
static inline void iswi_backup_current_clear(struct isw_engine *e, uint64_t page)
{
	if (iswi_bit(e->backup_current, page))
		iswi_bit_clear(e->backup_current, page);
}

#endif
