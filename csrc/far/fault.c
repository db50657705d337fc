/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults: a thread of the program waits for a page of the arena. How much comes with it is a window
 * that grows while faults follow each other, and the whole block once that is the cheaper way.
 */
#include <errno.h>

#include "far/blocks.h"

/*
 * A block is bought, which costs about as much as a dozen of its pages one by one and the memory of
 * 512, at its first fault: where single pages were fetched first, more of the block followed soon.
 * Some stays are rented up to RENT_SOON to see whether that still is so. Where it is not, since the
 * program touches pages all over more blocks than there is room for, bought blocks would only drive
 * each other out: RENT_SCATTERED. There, a fetch near the one before pays more, since a program
 * that walks through a block wants all of it.
 */
#define RENT_SOON      6u
#define RENT_SCATTERED 1024u
#define RENT_NEAR      9u
#define NEAR_PAGES     32u
#define SAMPLE_STAYS   8u
/* So many fetches later is soon: this share of the budget, in blocks. */
#define SOON_SHARE 4u
/* About so many of the last fetches are judged by, each with this weight. */
#define JUDGED        16u
#define JUDGED_WEIGHT 64u
#define WINDOW_GROWTH 4u
#define FILL_PAGES    16u
/* A block of which this much is far comes back as a huge page. */
#define WHOLE_PAGES_MIN 384u
/*
 * What comes as single pages anyway is bought by parts of this size, from the fault on: there each
 * page costs, and programs read forwards. Where more than this share of such blocks, of late, was
 * not wanted until they left, those that could be huge pages come by parts, too.
 */
#define PART_PAGES   80u
#define UNUSED_SHARE 4u

#define A (&iswf_agent)

/* How many pages come after so many, of `limit` that are left in that direction. */
static uint32_t grown(uint32_t pages, uint32_t limit)
{
	pages *= WINDOW_GROWTH;
	/* Near the border of the block it is not worth another fault. */
	return pages > limit || pages >= ISWF_BLOCK_PAGES / 4 ? limit : pages;
}

/*
 * What of the block is fetched for a fault at `page`: a window that grows while faults follow each
 * other upwards or downwards, from the next block, too.
 */
static struct iswf_mask choose_window(struct iswf_block *b, uint32_t block, uint32_t page)
{
	const struct iswf_block *before = block > 0 ? b - 1 : NULL;
	const struct iswf_block *behind = block + 1 < A->blocks_count ? b + 1 : NULL;
	uint32_t last = ISWF_BLOCK_PAGES - 1, first = page, end = page + 1;

	if (b->window != 0 && page == b->window_end)
		end = page + grown(b->window, ISWF_BLOCK_PAGES - page);
	else if (b->window != 0 && page + 1 + b->window == b->window_end)
		first = end - grown(b->window, end);
	else if (page == 0 && before != NULL && before->window_end == ISWF_BLOCK_PAGES)
		end = grown(before->window, ISWF_BLOCK_PAGES);
	else if (page == last && behind != NULL && behind->window != 0 &&
		 behind->window == behind->window_end)
		first = end - grown(behind->window, ISWF_BLOCK_PAGES);
	b->window = (uint16_t)(end - first);
	b->window_end = (uint16_t)end;
	return iswf_mask_range(first, end);
}

static void whole_window(struct iswf_block *b)
{
	b->window = ISWF_BLOCK_PAGES;
	b->window_end = ISWF_BLOCK_PAGES;
}

/* The part that begins, or downwards ends, at `page`, and what the window has chosen. */
static struct iswf_mask choose_part(struct iswf_block *b, uint32_t block, uint32_t page)
{
	uint32_t first = b->window_end - b->window, end = b->window_end;

	if (first < page && end - first < PART_PAGES)
		first = end < PART_PAGES ? 0 : end - PART_PAGES;
	else if (first == page && end - first < PART_PAGES)
		end = first + PART_PAGES > ISWF_BLOCK_PAGES ? ISWF_BLOCK_PAGES : first + PART_PAGES;
	b->window = (uint16_t)(end - first);
	b->window_end = (uint16_t)end;
	if (b->window == ISWF_BLOCK_PAGES)
		iswf_came_whole(block);
	return iswf_mask_range(first, end);
}

/* A little behind what was fetched last, or before it. */
static bool is_near(const struct iswf_block *b, uint32_t page)
{
	uint32_t first = b->window_end - b->window;

	if (b->window == 0)
		return false;
	return page < first ? first - page <= NEAR_PAGES : page - b->window_end < NEAR_PAGES;
}

/* Whether a block's next pages come soon or late; most, of late, late: they are scattered. */
static void judge(bool soon)
{
	A->late -= A->late / JUDGED;
	if (!soon)
		A->late += JUDGED_WEIGHT;
}

static bool are_scattered(void)
{
	return A->late > JUDGED * JUDGED_WEIGHT / 2;
}

void iswf_judge_parts(const struct iswf_block *b)
{
	if (!b->paid)
		return;
	A->unused -= A->unused / JUDGED;
	A->unused += JUDGED_WEIGHT * iswf_mask_count(&b->far) / ISWF_BLOCK_PAGES;
}

static bool are_sparse(void)
{
	return A->unused > JUDGED * JUDGED_WEIGHT / UNUSED_SHARE;
}

/* Whether the block comes whole from now on. */
static bool is_bought(struct iswf_block *b, uint32_t page)
{
	uint32_t since = ++A->fetch_count - b->fetched_at;

	b->fetched_at = A->fetch_count;
	if (b->rent != 0)
		judge(since <= iswf_budget_blocks() / SOON_SHARE);
	else if (b->paid)
		return true;
	else if (!are_scattered() && ++A->stays_count % SAMPLE_STAYS != 0)
		return true;
	b->rent += is_near(b, page) ? RENT_NEAR : 1;
	return b->rent > (are_scattered() ? RENT_SCATTERED : RENT_SOON);
}

static bool is_alone(const struct iswf_block *b)
{
	return !iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->hole);
}

/* Lock held, claimed: these are home now. */
static void came_home(struct iswf_block *b, const struct iswf_mask *pages)
{
	/* An allocation may have named some meanwhile, if the arena is only just being watched. */
	struct iswf_mask more = iswf_mask_without(pages, &b->home);

	if (iswf_mask_any(pages) && iswf_mask_any(&b->far) && !iswf_mask_any(&b->home) &&
	    !iswf_mask_any(&b->aside))
		iswf_begin_stay(b);
	iswf_mask_add(&b->home, pages);
	iswf_come_back(b, pages);
	iswf_held_more(iswf_mask_count(&more));
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

/* Lock held, claimed. False: as before, by pages. */
static bool buy(struct iswf_block *b, uint32_t block)
{
	whole_window(b);
	iswf_came_whole(block);
	return is_alone(b) && iswf_mask_count(&b->far) >= WHOLE_PAGES_MIN && fault_whole(b, block);
}

/* Lock held, claimed. */
static void fault_far(struct iswf_block *b, uint32_t block, uint32_t page)
{
	struct iswf_place place = {.to = iswf_at(block)};
	struct iswf_mask wanted;
	bool bought = is_bought(b, page);

	wanted = choose_window(b, block, page);
	if (iswf_fetch_pauses(are_scattered() && !bought && b->window == 1)) {
		wanted = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	} else if (bought || b->window >= ISWF_BLOCK_PAGES / 4) {
		if (b->tabled || (are_sparse() && b->window < ISWF_BLOCK_PAGES)) {
			b->paid |= b->rent == 0;
			wanted = choose_part(b, block, page);
		} else if (buy(b, block)) {
			return;
		} else {
			wanted = iswf_mask_range(0, ISWF_BLOCK_PAGES);
		}
	}
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
	iswf_cradle_open(cradle);
	(void)A->ops->move(iswf_at(block), cradle, ISWF_BLOCK_BYTES, &moved);
	iswf_cradle_clear(cradle, moved);
	pthread_mutex_lock(&A->lock);
	iswf_cradle_give(cradle);
	came = iswf_mask_range(0, (uint32_t)(moved / ISWF_PAGE_BYTES));
	b->filled = moved != 0 && !b->looked && A->tables_go;
	came_home(b, &came);
}

/* Lock held, claimed: a page that nothing has. */
static void fault_empty(struct iswf_block *b, uint32_t block, uint32_t page)
{
	struct iswf_place place = {.to = iswf_at(block)};
	struct iswf_mask wanted = choose_window(b, block, page);

	/* By single faults 2 MiB would cost many times as much, and stay single pages. */
	if (is_alone(b) && !iswf_mask_any(&b->far) &&
	    iswf_mask_count(&b->live) == ISWF_BLOCK_PAGES && iswf_takes_huge(b, block))
		fill_whole(b, block);
	if (iswf_has(&b->home, page))
		return;
	iswf_mask_take(&wanted, &b->home);
	iswf_mask_take(&wanted, &b->aside);
	iswf_mask_take(&wanted, &b->far);
	iswf_mask_take(&wanted, &b->hole);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	fill(&place, &wanted);
	pthread_mutex_lock(&A->lock);
	/* A page that is there is not ours to move: its discard may be under way. */
	b->unsure |= iswf_mask_any(&place.met) && !b->unseen;
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
	iswf_begin_stay(b); /* what is given up unused was away all the time */
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
