/* SPDX-License-Identifier: Apache-2.0 */
/* What the handlers of blocks share; see blocks.c. Lock held, unless a line says otherwise. */
#ifndef ISWF_BLOCKS_H
#define ISWF_BLOCKS_H

#include "far/agent.h"

static inline void iswf_count(atomic_uint_fast64_t *counter, uint64_t by)
{
	atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* So long after the kernel has refused to move a block it is tried again. */
#define ISWF_REFUSED_MS 100u

/* blocks.c */
uint32_t iswf_now_ms(void);                                     /* it may wrap */
void iswf_queue_add(enum iswf_queue_name name, uint32_t block); /* at its end */
struct iswf_block *iswf_claim(uint32_t block);                  /* waits */
/* The first block of the queue that nobody has claimed, claimed; ISWF_NONE. */
uint32_t iswf_claim_first(enum iswf_queue_name name);
/* The next victim of which nothing is sent, claimed; ISWF_NONE: there is none. Freed blocks come
 * first, since they cost nothing; then blocks that were filled a while ago, for their zeros. */
uint32_t iswf_claim_unsent(void);
uint32_t iswf_claim_victim(void); /* those, then the ones that are home */
/* The first pages come of a block of which some is far and nothing is home or aside. */
void iswf_begin_stay(struct iswf_block *b);
void iswf_sort(uint32_t block);    /* into the queue where it belongs, as its masks are */
void iswf_release(uint32_t block); /* drops the lock for the wake-up */
uint32_t iswf_budget_blocks(void);
bool iswf_is_empty(const struct iswf_block *b);
/* Pages may be there that no mask names. */
static inline bool iswf_is_unsure(const struct iswf_block *b)
{
	return b->unsure || b->unseen;
}
/*
 * Claimed, and nothing has any of it: whether a huge page can be moved there. May drop the lock. A
 * discard that the program makes meanwhile is not told from that of the table, so it must not be
 * needed.
 */
bool iswf_takes_huge(struct iswf_block *b, uint32_t block);
void iswf_held_more(int64_t pages); /* less, if negative */
/* Lock held: these pages of the block are far from now on; they no longer are. */
void iswf_go_away(struct iswf_block *b, const struct iswf_mask *pages);
void iswf_come_back(struct iswf_block *b, const struct iswf_mask *pages);
void iswf_shadow_take(struct iswf_block *b);
void iswf_shadow_give(struct iswf_block *b); /* unless something is aside */
char *iswf_shadow_of(const struct iswf_block *b);
bool iswf_is_shadow(const char *at);
/* A slot that nobody else uses; NULL: all are taken. May wait for memory. */
char *iswf_cradle_take(void);
void iswf_cradle_give(char *cradle);
/* Without the lock: there are pages in all of the slot, of zeros, one if that can be. */
void iswf_cradle_open(char *cradle);
/* The same: what a move out of the slot, of so many bytes, has left there is gone. */
void iswf_cradle_clear(char *cradle, size_t moved);

/* Where pages of a block go, and what came of it; the others are still where they were. */
struct iswf_place {
	char *to;   /* where the block's first page goes */
	bool moved; /* not to the arena: the program has moved the range */
	struct iswf_mask placed;
	struct iswf_mask met;  /* there was a page */
	struct iswf_mask gone; /* there was no mapping of ours */
};

/* fetch.c: claimed, without the lock. */
/* Moves every run of `pages`; returns those that were moved. *code_out: why not all. */
struct iswf_mask iswf_move_runs(char *to, char *from, const struct iswf_mask *pages, int *code_out);
/* Copies pages [first, end); `from` is where the first one is. -EAGAIN: later. */
int iswf_copy_run(struct iswf_place *place, uint32_t first, uint32_t end, const char *from);
/* Copies pages of the block's slot of the shadow, which keeps them. */
void iswf_copy_aside(uint32_t block, struct iswf_place *place, const struct iswf_mask *pages);
/* Moves `aside` back from the shadow; returns what is no longer there. */
struct iswf_mask iswf_put_back(uint32_t block, const struct iswf_mask *aside);
/* Brings the far pages of `wanted` from the device. */
void iswf_fetch(uint32_t block, struct iswf_place *place, const struct iswf_mask *wanted);
/*
 * The same for all of a block that is nowhere else, as one page, to where its first page is at
 * `to`; returns what came, the zeros of other pages among it.
 */
struct iswf_mask iswf_fetch_whole(uint32_t block, const struct iswf_mask *far, char *cradle,
				  char *to);

/* known.c: claimed, without the lock. */
/* Notes the digests of these pages, which are aside and there. Returns those that have not changed.
 */
struct iswf_mask iswf_know(uint32_t block, const struct iswf_mask *pages);
/* The device has all of them now. */
bool iswf_are_confirmed(uint32_t block, const struct iswf_mask *pages);
/* Lock held: no page of the block is known. */
void iswf_forget_digests(uint32_t block);
/* Lock held: from now on nothing leaves or comes. A program that locks all memory would lock them.
 */
void iswf_end_digests(void);

/* watch.c. While the arena is not watched: the program may touch these of its pages unseen. */
void iswf_may_be_home(struct iswf_block *b, const struct iswf_mask *pages);
/* Likewise: a part of the block was discarded. The rest of a huge page may be there still. */
void iswf_rest_may_be_home(struct iswf_block *b);

/* ahead.c: the block came whole, for a fault; the next one in its row may be wished for. */
void iswf_came_whole(uint32_t block);

/* pause.c, lock held: a fetch for a fault, of one page where pages are scattered, or of another
 * kind. Whether far memory pauses. */
bool iswf_fetch_pauses(bool is_stray);

/* fault.c: claimed. All that is home of it leaves: what of it nobody wanted is still far. */
void iswf_judge_parts(const struct iswf_block *b);
/* Drops the lock. What is aside comes home. */
void iswf_bring_aside(struct iswf_block *b, uint32_t block);

#endif
