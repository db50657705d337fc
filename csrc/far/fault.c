/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults: a thread of the program waits for a page of the arena. How much comes with it is a window
 * that grows while faults follow each other, and the whole block once that is the cheaper way.
 */
#include <errno.h>

#include "far/blocks.h"

/*
 * The block is bought once this much rent was paid in small fetches of one stay. A fetch a little
 * behind the one before counts for four: a program that walks through the block will want all of
 * it, and fourteen such fetches take as long. One anywhere says nothing of the next.
 */
#define RENT_MAX      56u
#define RENT_NEAR     4u
#define NEAR_PAGES    32u
#define WINDOW_GROWTH 4u
#define FILL_PAGES    16u
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

/* A little behind what was fetched last. */
static bool is_near(const struct iswf_block *b, uint32_t page)
{
	return b->window != 0 && page >= b->window_end && page - b->window_end < NEAR_PAGES;
}

static bool is_alone(const struct iswf_block *b)
{
	return !iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->hole);
}

/* Lock held, claimed: these are home now. */
static void came_home(struct iswf_block *b, const struct iswf_mask *pages)
{
	iswf_mask_add(&b->home, pages);
	iswf_mask_take(&b->far, pages);
	iswf_held_more(iswf_mask_count(pages));
}

/* Lock held, claimed. False: by pages, then. */
static bool fault_whole(struct iswf_block *b, uint32_t block)
{
	char *cradle = iswf_cradle_take();
	struct iswf_mask far = b->far, came;

	if (cradle == NULL)
		return false;
	pthread_mutex_unlock(&A->lock);
	came = iswf_fetch_whole(block, &far, cradle, iswf_at(block));
	pthread_mutex_lock(&A->lock);
	iswf_cradle_give(cradle);
	came_home(b, &came);
	return iswf_mask_any(&came);
}

/* Lock held, claimed. */
static void fault_far(struct iswf_block *b, uint32_t block, uint32_t page)
{
	struct iswf_place place = {.to = iswf_at(block)};
	struct iswf_mask wanted;
	uint32_t end;

	b->rent += is_near(b, page) ? RENT_NEAR : 1;
	choose_window(b, block, page, &end);
	if (b->rent > RENT_MAX || b->window >= ISWF_BLOCK_PAGES / 4) {
		whole_window(b);
		page = 0;
		end = ISWF_BLOCK_PAGES;
		iswf_came_whole(block);
	}
	if (end - page == ISWF_BLOCK_PAGES && is_alone(b) &&
	    iswf_mask_count(&b->far) >= WHOLE_PAGES_MIN && fault_whole(b, block))
		return;
	wanted = iswf_mask_range(page, end);
	wanted = iswf_mask_and(&wanted, &b->far);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	iswf_fetch(block, &place, &wanted);
	pthread_mutex_lock(&A->lock);
	b->wanted |= iswf_mask_any(&place.met);
	iswf_mask_add(&place.placed, &place.met); /* what is there is newer */
	came_home(b, &place.placed);
	iswf_count(&A->count.small_fetches, 1);
}

/* Zeros that belong to the program, not the kernel's page of zeros: it is about to write there. */
static void fill(struct iswf_place *place, const struct iswf_mask *pages)
{
	static const char zeros[FILL_PAGES * ISWF_PAGE_BYTES];
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		if (run > FILL_PAGES)
			run = FILL_PAGES;
		if (iswf_copy_run(place, first, first + run, zeros) != 0)
			break;
	}
}

/* Lock held, claimed: all of an empty block, as one page. */
static void fill_whole(struct iswf_block *b, uint32_t block)
{
	char *cradle = iswf_cradle_take();
	struct iswf_mask came;
	size_t moved = 0;

	if (cradle == NULL)
		return;
	whole_window(b);
	pthread_mutex_unlock(&A->lock);
	for (size_t at = 0; at < ISWF_BLOCK_BYTES; at += ISWF_PAGE_BYTES)
		((volatile char *)cradle)[at] = 0;
	(void)A->ops->move(iswf_at(block), cradle, ISWF_BLOCK_BYTES, &moved);
	iswf_clear_cradle(cradle, moved);
	pthread_mutex_lock(&A->lock);
	iswf_cradle_give(cradle);
	came = iswf_mask_range(0, (uint32_t)(moved / ISWF_PAGE_BYTES));
	came_home(b, &came);
}

/* Lock held, claimed: a page that nothing has. */
static void fault_empty(struct iswf_block *b, uint32_t block, uint32_t page)
{
	struct iswf_place place = {.to = iswf_at(block)};
	struct iswf_mask wanted;
	uint32_t end;

	choose_window(b, block, page, &end);
	/* By single faults 2 MiB would cost many times as much, and stay single pages. */
	if (is_alone(b) && !iswf_mask_any(&b->far) && iswf_mask_count(&b->live) == ISWF_BLOCK_PAGES)
		fill_whole(b, block);
	if (iswf_has(&b->home, page))
		return;
	wanted = iswf_mask_range(page, end);
	iswf_mask_take(&wanted, &b->home);
	iswf_mask_take(&wanted, &b->aside);
	iswf_mask_take(&wanted, &b->far);
	iswf_mask_take(&wanted, &b->hole);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	fill(&place, &wanted);
	pthread_mutex_lock(&A->lock);
	/* A page that is there is not ours to move: its discard may be under way. */
	b->unsure |= iswf_mask_any(&place.met);
	came_home(b, &place.placed);
	iswf_count(&A->count.pages_filled, iswf_mask_count(&place.placed));
}

void iswf_bring_aside(struct iswf_block *b, uint32_t block)
{
	struct iswf_mask aside = b->aside, back;

	pthread_mutex_unlock(&A->lock);
	back = iswf_put_back(block, &aside);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &back);
	iswf_mask_take(&b->aside, &back);
	iswf_shadow_give(b);
	b->wanted = true; /* some may have been there, which wakes nobody */
	iswf_count(&A->count.pages_back, iswf_mask_count(&back));
}

/* Lock held, claimed. */
static void fault_aside(struct iswf_block *b, uint32_t block)
{
	bool ahead = b->ahead;

	iswf_bring_aside(b, block);
	if (!ahead || b->ahead)
		return;
	iswf_count(&A->count.blocks_ahead_used, 1);
	whole_window(b);
	iswf_came_whole(block);
}

/* F4: the program may have discarded it by a way that we do not see, or the kernel has it. */
static void fault_home(uint32_t block, uint32_t page)
{
	char *at = iswf_at(block) + (size_t)page * ISWF_PAGE_BYTES;

	pthread_mutex_unlock(&A->lock);
	if (A->ops->zero(at) != 0)
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
		if (!iswf_is_shadow(at) || A->ops->zero(at) != 0)
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
	if (b->left || iswf_has(&b->home, page) || iswf_has(&b->hole, page)) {
		fault_home(block, page);
	} else {
		if (iswf_has(&b->aside, page))
			fault_aside(b, block);
		else if (iswf_has(&b->far, page))
			fault_far(b, block, page);
		else
			fault_empty(b, block, page);
		if (!iswf_has(&b->home, page)) /* later: it faults again */
			b->wanted = true;
	}
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
}
