/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults: a thread of the program waits for a page of the arena. How much comes with it is a window
 * that grows while faults follow each other, and the whole block once that is the cheaper way.
 */
#include <errno.h>

#include "far/blocks.h"

/* What fetching a whole block costs, in small fetches: after so many of them it is cheaper. */
#define SMALL_FETCHES_MAX 32u
#define WINDOW_GROWTH     4u
#define FILL_PAGES        16u
/* A block of which this much is far comes back as a huge page. */
#define WHOLE_PAGES_MIN 448u

#define A (&iswf_agent)

/*
 * How much of the block is fetched for a fault at `page`: a window that grows while faults follow
 * each other, and all once that is the cheaper way.
 */
static void choose_window(struct iswf_block *b, uint32_t block, uint32_t page, uint32_t *end_out)
{
	const struct iswf_block *before = block > 0 ? b - 1 : NULL;
	uint32_t window = 1;

	if (b->window != 0 && page == b->window_end)
		window = b->window * WINDOW_GROWTH;
	else if (page == 0 && before != NULL && before->window_end == ISWF_BLOCK_PAGES)
		window = before->window * WINDOW_GROWTH;
	if (window > ISWF_BLOCK_PAGES - page)
		window = ISWF_BLOCK_PAGES - page;
	/* Near the end of the block it is not worth another fault. */
	if (window >= ISWF_BLOCK_PAGES / 4)
		window = ISWF_BLOCK_PAGES - page;
	b->window = (uint16_t)window;
	b->window_end = (uint16_t)(page + window);
	*end_out = page + window;
}

static void whole_window(struct iswf_block *b)
{
	b->window = ISWF_BLOCK_PAGES;
	b->window_end = ISWF_BLOCK_PAGES;
}

/* Lock held, claimed. */
static void fault_far(struct iswf_block *b, uint32_t block, uint32_t page)
{
	uint32_t far_pages = iswf_mask_count(&b->far), end;
	bool alone =
		!iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->hole);
	struct iswf_mask wanted;
	char *cradle = NULL;

	choose_window(b, block, page, &end);
	if (++b->small_fetches > SMALL_FETCHES_MAX || b->window >= ISWF_BLOCK_PAGES / 4) {
		whole_window(b);
		page = 0;
		end = ISWF_BLOCK_PAGES;
	}
	if (end - page == ISWF_BLOCK_PAGES && alone && far_pages >= WHOLE_PAGES_MIN &&
	    A->cradle_free_count > 0) {
		iswf_need(ISWF_BLOCK_PAGES);
		if (A->cradle_free_count > 0)
			cradle = A->cradle + (uint64_t)A->cradle_free[--A->cradle_free_count] *
						     ISWF_BLOCK_BYTES;
	}
	if (cradle != NULL) {
		bool done;

		wanted = b->far;
		pthread_mutex_unlock(&A->lock);
		done = iswf_fetch_whole(block, &wanted, cradle);
		pthread_mutex_lock(&A->lock);
		A->cradle_free[A->cradle_free_count++] =
			(uint32_t)((cradle - A->cradle) / ISWF_BLOCK_BYTES);
		if (done) {
			b->home = iswf_mask_range(0, ISWF_BLOCK_PAGES);
			b->far = iswf_mask_range(0, 0);
			iswf_held_more(ISWF_BLOCK_PAGES);
			return;
		}
	}
	wanted = iswf_mask_range(page, end);
	wanted = iswf_mask_and(&wanted, &b->far);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	iswf_fetch(block, iswf_at(block), &wanted);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &wanted);
	iswf_mask_take(&b->far, &wanted);
	iswf_held_more(iswf_mask_count(&wanted));
	iswf_count(&A->count.small_fetches, 1);
}

/* Zeros that belong to the program, not the kernel's page of zeros: it is about to write there. */
static void fill(char *at, uint32_t pages)
{
	static const char zeros[FILL_PAGES * ISWF_PAGE_BYTES];

	while (pages > 0) {
		uint32_t now = pages < FILL_PAGES ? pages : FILL_PAGES;

		(void)A->ops->copy(at, zeros, (size_t)now * ISWF_PAGE_BYTES);
		at += (size_t)now * ISWF_PAGE_BYTES;
		pages -= now;
	}
}

/* Lock held, claimed: a page that nothing has. */
static void fault_empty(struct iswf_block *b, uint32_t block, uint32_t page)
{
	struct iswf_mask all, empty, there = b->home, wanted;
	uint32_t run, end;
	char *cradle = NULL;
	size_t moved;

	iswf_mask_add(&there, &b->aside);
	iswf_mask_add(&there, &b->far);
	iswf_mask_add(&there, &b->hole);
	all = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	empty = iswf_mask_without(&all, &there);
	choose_window(b, block, page, &end);
	if (page == 0 && iswf_mask_count(&empty) == ISWF_BLOCK_PAGES &&
	    iswf_mask_count(&b->live) == ISWF_BLOCK_PAGES && b->window > 1 &&
	    A->cradle_free_count > 0) {
		iswf_need(ISWF_BLOCK_PAGES);
		if (A->cradle_free_count > 0)
			cradle = A->cradle + (uint64_t)A->cradle_free[--A->cradle_free_count] *
						     ISWF_BLOCK_BYTES;
	}
	if (cradle != NULL) {
		int code;

		whole_window(b);
		pthread_mutex_unlock(&A->lock);
		for (size_t at = 0; at < ISWF_BLOCK_BYTES; at += ISWF_PAGE_BYTES)
			((volatile char *)cradle)[at] = 0;
		code = A->ops->move(iswf_at(block), cradle, ISWF_BLOCK_BYTES, &moved);
		if (code != 0)
			A->ops->discard(cradle, ISWF_BLOCK_BYTES, false);
		pthread_mutex_lock(&A->lock);
		A->cradle_free[A->cradle_free_count++] =
			(uint32_t)((cradle - A->cradle) / ISWF_BLOCK_BYTES);
		wanted = iswf_mask_range(0, (uint32_t)(moved / ISWF_PAGE_BYTES));
		iswf_mask_add(&b->home, &wanted);
		iswf_held_more(iswf_mask_count(&wanted));
		if (iswf_has(&b->home, page))
			return;
	}
	wanted = iswf_mask_range(page, end);
	wanted = iswf_mask_and(&wanted, &empty);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	for (uint32_t first = page; (run = iswf_mask_run(&wanted, &first)) != 0; first += run)
		fill(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES, run);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &wanted);
	iswf_held_more(iswf_mask_count(&wanted));
	iswf_count(&A->count.pages_filled, iswf_mask_count(&wanted));
}

/* Lock held, claimed. */
void iswf_bring_aside(struct iswf_block *b, uint32_t block)
{
	struct iswf_mask aside = b->aside;

	pthread_mutex_unlock(&A->lock);
	iswf_put_back(block, &aside);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &aside);
	iswf_mask_take(&b->aside, &aside);
	iswf_shadow_give(b);
	iswf_count(&A->count.pages_back, iswf_mask_count(&aside));
}

/* F4: it is home by our books; the program may have discarded it by a way that we do not see. */
static void fault_home(uint32_t block, uint32_t page)
{
	char *at = iswf_at(block) + (size_t)page * ISWF_PAGE_BYTES;
	int code;

	pthread_mutex_unlock(&A->lock);
	code = A->ops->zero(at, ISWF_PAGE_BYTES);
	if (code != 0)
		A->ops->wake(at, ISWF_PAGE_BYTES);
	pthread_mutex_lock(&A->lock);
}

void iswf_fault(char *at)
{
	struct iswf_block *b;
	uint32_t block, page;

	iswf_count(&A->count.faults, 1);
	if (!iswf_is_ours(at)) {
		/* A hole in the shadow: what was there was discarded meanwhile. Or a range that
		 * something else has moved, which is the kernel's by now. */
		if (!iswf_is_shadow(at) || A->ops->zero(at, ISWF_PAGE_BYTES) != 0)
			A->ops->wake(at, ISWF_PAGE_BYTES);
		return;
	}
	block = (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
	page = (uint32_t)((at - A->arena) % ISWF_BLOCK_BYTES / ISWF_PAGE_BYTES);
	pthread_mutex_lock(&A->lock);
	b = &A->blocks[block];
	if (b->claimed) {
		b->wanted = true;
		pthread_mutex_unlock(&A->lock);
		return;
	}
	b->claimed = true;
	if (iswf_has(&b->home, page))
		fault_home(block, page);
	else if (iswf_has(&b->aside, page))
		iswf_bring_aside(b, block);
	else if (iswf_has(&b->far, page))
		fault_far(b, block, page);
	else
		fault_empty(b, block, page);
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
}
