/* SPDX-License-Identifier: Apache-2.0 */
/* What the program needs no more, has taken elsewhere, or wants to be the kernel's. */
#include <errno.h>

#include "far/blocks.h"

#define AGAIN_NS 1000000u
/* Tries to unregister a block, which needs a mapping of its own: the program may have all. */
#define LEAVES_MAX 100u

#define A (&iswf_agent)

/* ------------------------------------------------------- claimed, without the lock */

/* Returns the pages that the kernel has not discarded. */
static struct iswf_mask discard_runs(char *base, const struct iswf_mask *pages, bool is_watched,
				     int *code_out)
{
	struct iswf_mask kept = {{0}};
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		struct iswf_mask part = iswf_mask_range(first, first + run);
		int code = A->ops->discard(base + (size_t)first * ISWF_PAGE_BYTES,
					   (size_t)run * ISWF_PAGE_BYTES, is_watched);

		if (code == 0)
			continue;
		*code_out = code;
		iswf_mask_add(&kept, &part);
	}
	return kept;
}

static void unmap_runs(uint32_t block, const struct iswf_mask *pages)
{
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		char *at = iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES;
		size_t bytes = (size_t)run * ISWF_PAGE_BYTES;

		if (A->ops->unmap(at, bytes) != 0) /* too many mappings: at least the memory */
			(void)A->ops->discard(at, bytes, !A->blocks[block].left);
	}
}

static void discard_aside(uint32_t block, const struct iswf_mask *aside)
{
	int code;

	if (iswf_mask_any(aside))
		(void)discard_runs(iswf_shadow_of(&A->blocks[block]), aside, true, &code);
}

static int leave_mapped(uint32_t block, bool children)
{
	struct iswf_mask mapped = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	uint32_t run;
	int code = 0;

	iswf_mask_take(&mapped, &A->blocks[block].hole);
	for (uint32_t first = 0; code == 0 && (run = iswf_mask_run(&mapped, &first)) != 0;
	     first += run)
		code = A->ops->leave(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
				     (size_t)run * ISWF_PAGE_BYTES, children);
	return code;
}

/* ------------------------------------------------------------------- discards */

/* Lock held, claimed: nothing has them now. */
static void drop(struct iswf_block *b, const struct iswf_mask *pages)
{
	struct iswf_mask home = iswf_mask_and(&b->home, pages);
	struct iswf_mask aside = iswf_mask_and(&b->aside, pages);

	iswf_mask_take(&b->home, pages);
	iswf_mask_take(&b->aside, pages);
	iswf_come_back(b, pages);
	iswf_shadow_give(b);
	iswf_held_more(-(int64_t)iswf_mask_count(&home) - iswf_mask_count(&aside));
}

/* Lock held, claimed: those of the pages that stay as they are, for the next allocation. */
static struct iswf_mask keep(struct iswf_block *b, const struct iswf_mask *pages)
{
	struct iswf_mask kept = {{0}};

	if (b->fixed || iswf_is_unsure(b) || b->left || iswf_is_tight())
		return kept;
	kept = iswf_mask_and(&b->home, pages);
	iswf_mask_take(&b->live, &kept);
	return kept;
}

int iswf_discard(uint32_t block, uint32_t first, uint32_t end, enum iswf_fate fate)
{
	struct iswf_mask pages = iswf_mask_range(first, end), kept = {{0}}, home, aside;
	struct iswf_block *b = iswf_claim(block);
	bool dead = fate != ISWF_ZEROS, whole;
	int code = 0;

	iswf_mask_take(&pages, &b->hole);
	if (fate == ISWF_FREED) {
		home = keep(b, &pages);
		iswf_mask_take(&pages, &home);
	}
	home = iswf_mask_and(&b->home, &pages);
	aside = iswf_mask_and(&b->aside, &pages);
	pthread_mutex_unlock(&A->lock);
	whole = iswf_mask_count(&pages) == ISWF_BLOCK_PAGES;
	if (iswf_mask_any(&home)) /* a part of a huge page makes single ones of it */
		b->tabled = !(whole && A->tables_go) &&
			    (b->tabled || !whole || !A->ops->is_huge(iswf_at(block)));
	if (dead && b->fixed)
		kept = pages;
	else if (iswf_mask_any(&home) || b->fixed || iswf_is_unsure(b))
		kept = discard_runs(iswf_at(block), &pages, !b->left, &code);
	b->tabled |= iswf_mask_any(&kept);
	if (dead && iswf_mask_any(&kept))
		unmap_runs(block, &kept);
	discard_aside(block, &aside);
	pthread_mutex_lock(&A->lock);
	if (dead) {
		iswf_mask_add(&b->hole, &kept);
		iswf_mask_take(&b->live, &pages);
	} else {
		iswf_mask_take(&pages, &kept);
	}
	drop(b, &pages);
	iswf_may_be_home(b, &pages);
	if (!whole)
		iswf_rest_may_be_home(b);
	iswf_release(block);
	return dead ? 0 : code;
}

/*
 * Lock held. The kernel forgets these pages, or (unmapped) something else may be there by now. The
 * kernel goes on only after it was heard, so the pages may be there still.
 */
static void forget(uint32_t block, uint32_t first, uint32_t end, bool unmapped)
{
	struct iswf_mask pages = iswf_mask_range(first, end), aside;
	struct iswf_block *b = iswf_claim(block);

	aside = iswf_mask_and(&b->aside, &pages);
	b->tabled = true;
	pthread_mutex_unlock(&A->lock);
	discard_aside(block, &aside);
	pthread_mutex_lock(&A->lock);
	if (unmapped) {
		b->fixed = true;
		iswf_mask_add(&b->hole, &pages);
		iswf_mask_take(&b->live, &pages);
	} else {
		b->unsure = true;
	}
	drop(b, &pages);
	iswf_release(block);
}

void iswf_lose(uint32_t block, uint32_t first, uint32_t end)
{
	forget(block, first, end, true);
}

/* ------------------------------------------------------------------- hand-back */

/* Lock held, claimed. False: not all of it could come home yet. */
static bool come_home(struct iswf_block *b, uint32_t block)
{
	struct iswf_place place = {.to = iswf_at(block)};
	struct iswf_mask far;

	if (iswf_mask_any(&b->aside))
		iswf_bring_aside(b, block);
	far = b->far;
	if (iswf_mask_any(&far)) {
		pthread_mutex_unlock(&A->lock);
		iswf_fetch(block, &place, &far);
		pthread_mutex_lock(&A->lock);
		iswf_mask_add(&place.placed, &place.met); /* what is there is newer */
		iswf_mask_add(&b->home, &place.placed);
		iswf_come_back(b, &place.placed);
		iswf_held_more(iswf_mask_count(&place.placed));
	}
	return !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->far);
}

/* Lock held, claimed: F2. From here on the kernel fills what is empty. False: it refuses. */
static bool leave(struct iswf_block *b, uint32_t block, bool children, enum iswf_why why)
{
	struct iswf_mask there = b->home;
	bool watched = A->watched;
	int code;

	pthread_mutex_unlock(&A->lock);
	code = leave_mapped(block, children);
	if (!watched) /* else home says it */
		there = A->ops->there(iswf_at(block));
	pthread_mutex_lock(&A->lock);
	b->fixed = true;
	if (A->watching || A->watched != watched) /* it may be registered again */
		return false;
	if (code != 0 && watched)
		return false;
	there = iswf_mask_and(&there, &b->home);
	iswf_count(&A->count.handed_back[why], iswf_mask_count(&there));
	iswf_held_more(-(int64_t)iswf_mask_count(&b->home));
	b->home = iswf_mask_range(0, 0);
	b->left = true;
	return true;
}

/* Lock held, claimed, nothing is taken meanwhile: what was freed is not the kernel's for good. */
static void drop_freed(struct iswf_block *b, uint32_t block)
{
	struct iswf_mask freed = iswf_mask_without(&b->home, &b->live), kept;
	int code;

	if (!iswf_mask_any(&freed) || b->left)
		return;
	pthread_mutex_unlock(&A->lock);
	kept = discard_runs(iswf_at(block), &freed, true, &code);
	pthread_mutex_lock(&A->lock);
	b->tabled = true;
	iswf_mask_take(&freed, &kept);
	drop(b, &freed);
}

static void hand_back(uint32_t block, bool children, enum iswf_why why)
{
	for (uint32_t leaves = 0; leaves < LEAVES_MAX;) {
		struct iswf_block *b;
		bool done;

		while (A->watching)
			pthread_cond_wait(&A->released, &A->lock);
		b = iswf_claim(block);
		if (iswf_rests())
			drop_freed(b, block);
		done = (!iswf_mask_any(&b->live) && iswf_is_empty(b)) || b->left;
		if (!done && come_home(b, block)) {
			done = leave(b, block, children, why);
			leaves++;
		}
		b->wanted = true; /* who waits for a page of it asks the kernel now */
		iswf_release(block);
		if (done)
			return;
		pthread_mutex_unlock(&A->lock);
		A->ops->pause(AGAIN_NS);
		pthread_mutex_lock(&A->lock);
	}
}

void iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why)
{
	for (uint32_t block = first; block < end; block++)
		hand_back(block, children, why);
}

/* ------------------------------------------------------------------- events */

/* What of `pages` has not found its end. */
static bool takes_more(const struct iswf_mask *pages, const struct iswf_place *place,
		       struct iswf_mask *more_out)
{
	*more_out = iswf_mask_without(pages, &place->placed);
	iswf_mask_take(more_out, &place->met);
	iswf_mask_take(more_out, &place->gone);
	return iswf_mask_any(more_out);
}

/* Lock held. What is aside or far of pages that were moved elsewhere, with the first at `to`. */
static void follow(uint32_t block, uint32_t first, uint32_t end, char *to)
{
	struct iswf_place place = {.to = to - (size_t)first * ISWF_PAGE_BYTES, .moved = true};
	struct iswf_mask pages = iswf_mask_range(first, end), aside, far, more;
	struct iswf_block *b = iswf_claim(block);

	aside = iswf_mask_and(&b->aside, &pages);
	far = iswf_mask_and(&b->far, &pages);
	pthread_mutex_unlock(&A->lock);
	/* Nobody else can bring them: what is not placed now would be zeros. */
	while (takes_more(&aside, &place, &more)) {
		iswf_copy_aside(block, &place, &more);
		if (takes_more(&aside, &place, &more))
			A->ops->pause(AGAIN_NS);
	}
	while (takes_more(&far, &place, &more))
		iswf_fetch(block, &place, &more);
	pthread_mutex_lock(&A->lock);
	iswf_count(&A->count.handed_back[ISWF_WHY_MOVED], end - first);
	iswf_release(block);
}

/* Lock held: whole pages of the arena. */
static void removed(char *from, char *end, bool is_unmapped, char *to)
{
	for (char *at = from; at < end;) {
		uint32_t block = (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
		uint32_t first = (uint32_t)((at - iswf_at(block)) / ISWF_PAGE_BYTES);
		char *stop = iswf_at(block + 1) < end ? iswf_at(block + 1) : end;
		uint32_t last = (uint32_t)((stop - iswf_at(block)) / ISWF_PAGE_BYTES);

		if (to != NULL)
			follow(block, first, last, to + (at - from));
		forget(block, first, last, is_unmapped);
		at = stop;
	}
}

void iswf_removed(char *from, char *end, bool is_unmapped, char *to)
{
	char *to_all = to;
	size_t bytes = (size_t)(end - from);

	if (from < A->arena) {
		if (to != NULL)
			to += A->arena - from;
		from = A->arena;
	}
	if (end > iswf_at(A->blocks_count))
		end = iswf_at(A->blocks_count);
	if (from >= end)
		return;
	pthread_mutex_lock(&A->lock);
	if (is_unmapped)
		iswf_withdraw((uint32_t)((from - A->arena) / ISWF_PAGE_BYTES),
			      (uint32_t)((end - A->arena) / ISWF_PAGE_BYTES));
	removed(from, end, is_unmapped, to);
	if (is_unmapped) /* some may just have been given up */
		iswf_withdraw((uint32_t)((from - A->arena) / ISWF_PAGE_BYTES),
			      (uint32_t)((end - A->arena) / ISWF_PAGE_BYTES));
	pthread_mutex_unlock(&A->lock);
	if (to_all != NULL)
		(void)A->ops->leave(to_all, bytes, true);
}
