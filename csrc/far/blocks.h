/* SPDX-License-Identifier: Apache-2.0 */
/* What the handlers of blocks share; see blocks.c. Lock held, unless a line says otherwise. */
#ifndef ISWF_BLOCKS_H
#define ISWF_BLOCKS_H

#include "far/agent.h"

static inline void iswf_count(atomic_uint_fast64_t *counter, uint64_t by)
{
	atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* blocks.c */
void iswf_queue_add(enum iswf_queue_name name, uint32_t block); /* at its end */
struct iswf_block *iswf_claim(uint32_t block);                  /* waits */
/* The first block of the queue that nobody has claimed, claimed; ISWF_NONE. */
uint32_t iswf_claim_first(enum iswf_queue_name name);
void iswf_release(uint32_t block); /* drops the lock for the wake-up */
bool iswf_is_empty(const struct iswf_block *b);
void iswf_held_more(int64_t pages); /* less, if negative */
void iswf_shadow_take(struct iswf_block *b);
void iswf_shadow_give(struct iswf_block *b);
char *iswf_shadow_of(const struct iswf_block *b);
bool iswf_is_shadow(const char *at);

/* fetch.c: claimed, without the lock. */
/* Moves every run of `pages`; returns those that were moved. */
struct iswf_mask iswf_move_runs(char *to, char *from, const struct iswf_mask *pages);
/* Copies pages of the block's slot of the shadow to where the block's first page is at `to`. */
void iswf_copy_aside(uint32_t block, char *to, const struct iswf_mask *pages);
/* What lies aside goes back. A page that cannot be moved (never seen) is copied. */
void iswf_put_back(uint32_t block, const struct iswf_mask *aside);
/* Brings the far pages of `wanted` to the block whose first page is at `to`. */
void iswf_fetch(uint32_t block, char *to, const struct iswf_mask *wanted);
/* The same for all of a block that is nowhere else, as one page. False: by pages, then. */
bool iswf_fetch_whole(uint32_t block, const struct iswf_mask *far, char *cradle);

/* fault.c: claimed; drops the lock. All that is aside comes home. */
void iswf_bring_aside(struct iswf_block *b, uint32_t block);

#endif
