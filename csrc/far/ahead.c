/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Read-ahead. A block that came whole beside one that came whole a moment ago is one of a row: the
 * next one in that direction is brought aside before anybody faults there. From aside it comes home
 * by a move; what nobody needed is given up without being sent, since the device has it still.
 */
#include "far/blocks.h"

/* So many whole blocks later the neighbour belongs to the same row still: others come meanwhile. */
#define ROW_BLOCKS_MAX 8u
/* A block of which this much is far is worth it. */
#define AHEAD_PAGES_MIN 448u

#define A (&iswf_agent)

static bool came_lately(uint32_t block)
{
	uint32_t at;

	if (block >= A->blocks_count) /* before the first, too */
		return false;
	at = A->blocks[block].whole_at;
	return at != 0 && A->whole_count - at <= ROW_BLOCKS_MAX;
}

/* The newest wishes count. */
static void wish(uint32_t block)
{
	if (block >= A->blocks_count)
		return;
	if (A->wishes_count == ISWF_AHEAD_MAX) {
		for (uint32_t i = 1; i < ISWF_AHEAD_MAX; i++)
			A->wishes[i - 1] = A->wishes[i];
		A->wishes_count--;
	}
	A->wishes[A->wishes_count++] = block;
	pthread_cond_signal(&A->work);
}

void iswf_came_whole(uint32_t block)
{
	if (came_lately(block - 1))
		wish(block + 1);
	else if (came_lately(block + 1))
		wish(block - 1);
	A->blocks[block].whole_at = ++A->whole_count;
}

/* Lock held: whether the block is far alone, and there is room for it. */
static bool may_come(const struct iswf_block *b)
{
	return !b->claimed && !b->fixed && !iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) &&
	       !iswf_mask_any(&b->hole) && iswf_mask_count(&b->far) >= AHEAD_PAGES_MIN &&
	       A->held_pages + ISWF_BLOCK_PAGES <= A->budget_pages &&
	       A->ahead_count < ISWF_AHEAD_MAX && A->shadow_free_count > 0 &&
	       A->cradle_free_count > 1; /* faults need them more */
}

/* Lock held: the next block to be brought, claimed, with its slots; ISWF_NONE. */
static uint32_t next_wish(char **cradle_out)
{
	while (!iswf_rests() && A->wishes_count > 0) {
		uint32_t block = A->wishes[--A->wishes_count];
		struct iswf_block *b = &A->blocks[block];

		if (!may_come(b))
			continue;
		*cradle_out = iswf_cradle_take(); /* there is room: it does not wait */
		b->claimed = true;
		b->ahead = true;
		A->ahead_count++;
		iswf_shadow_take(b);
		iswf_held_more(iswf_mask_count(&b->far));
		return block;
	}
	return ISWF_NONE;
}

/* Claimed, without the lock: the slot holds what is aside, and nothing else. */
static void clear_others(char *slot, struct iswf_mask came, const struct iswf_mask *far)
{
	uint32_t run;

	iswf_mask_take(&came, far);
	for (uint32_t first = 0; (run = iswf_mask_run(&came, &first)) != 0; first += run)
		(void)A->ops->discard(slot + (size_t)first * ISWF_PAGE_BYTES,
				      (size_t)run * ISWF_PAGE_BYTES, true);
}

bool iswf_ahead(void)
{
	struct iswf_mask far, came;
	struct iswf_block *b;
	uint32_t block;
	char *cradle;

	pthread_mutex_lock(&A->lock);
	block = next_wish(&cradle);
	if (block == ISWF_NONE) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	b = &A->blocks[block];
	far = b->far;
	pthread_mutex_unlock(&A->lock);

	came = iswf_fetch_whole(block, &far, cradle, iswf_shadow_of(b));
	clear_others(iswf_shadow_of(b), came, &far);
	came = iswf_mask_and(&came, &far);

	pthread_mutex_lock(&A->lock);
	iswf_cradle_give(cradle);
	b->aside = came;
	iswf_come_back(b, &came);
	iswf_held_more((int64_t)iswf_mask_count(&came) - iswf_mask_count(&far));
	iswf_shadow_give(b);
	iswf_count(&A->count.blocks_ahead, iswf_mask_any(&came));
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
	return true;
}
