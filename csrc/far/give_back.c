/* SPDX-License-Identifier: Apache-2.0 */
/* What the program needs no more, has taken elsewhere, or wants to be the kernel's. */
#include <errno.h>

#include "far/blocks.h"

#define A (&iswf_agent)

/* Claimed, without the lock: what of these pages is mapped there still. */
static void discard_mapped(uint32_t block, const struct iswf_mask *pages, bool is_watched)
{
	struct iswf_mask mapped = iswf_mask_without(pages, &A->blocks[block].hole);
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(&mapped, &first)) != 0; first += run)
		A->ops->discard(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
				(size_t)run * ISWF_PAGE_BYTES, is_watched);
}

static void leave_mapped(uint32_t block, bool children)
{
	struct iswf_mask all = iswf_mask_range(0, ISWF_BLOCK_PAGES), mapped;
	uint32_t run;

	if (A->blocks[block].left)
		return;
	mapped = iswf_mask_without(&all, &A->blocks[block].hole);
	for (uint32_t first = 0; (run = iswf_mask_run(&mapped, &first)) != 0; first += run)
		(void)A->ops->leave(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
				    (size_t)run * ISWF_PAGE_BYTES, children);
}

void iswf_discard(uint32_t block, uint32_t first, uint32_t end, bool dead)
{
	struct iswf_mask pages = iswf_mask_range(first, end), home, aside;
	size_t at = (size_t)first * ISWF_PAGE_BYTES,
	       bytes = (size_t)(end - first) * ISWF_PAGE_BYTES;
	struct iswf_block *b = iswf_claim(block);

	home = iswf_mask_and(&b->home, &pages);
	aside = iswf_mask_and(&b->aside, &pages);
	pthread_mutex_unlock(&A->lock);
	if (iswf_mask_any(&home) || b->fixed)
		discard_mapped(block, &pages, !b->left);
	if (iswf_mask_any(&aside))
		A->ops->discard(iswf_shadow_of(b) + at, bytes, true);
	pthread_mutex_lock(&A->lock);
	iswf_mask_take(&b->home, &pages);
	iswf_mask_take(&b->far, &pages);
	iswf_mask_take(&b->aside, &pages);
	if (dead)
		iswf_mask_take(&b->live, &pages);
	if (b->slot != 0 && !iswf_mask_any(&b->aside))
		iswf_shadow_give(b);
	iswf_held_more(-(int64_t)iswf_mask_count(&home) - iswf_mask_count(&aside));
	iswf_release(block);
}

/* Lock held, claimed: all that is not home comes home. */
static void come_home(struct iswf_block *b, uint32_t block)
{
	struct iswf_mask far;

	if (iswf_mask_any(&b->aside))
		iswf_bring_aside(b, block);
	far = b->far;
	if (!iswf_mask_any(&far))
		return;
	iswf_need(iswf_mask_count(&far));
	pthread_mutex_unlock(&A->lock);
	iswf_fetch(block, iswf_at(block), &far);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &far);
	b->far = iswf_mask_range(0, 0);
	iswf_held_more(iswf_mask_count(&far));
}

void iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why)
{
	for (uint32_t block = first; block < end; block++) {
		struct iswf_block *b = iswf_claim(block);

		if (!iswf_mask_any(&b->live) && iswf_is_empty(b)) { /* nobody's: it stays ours */
			iswf_release(block);
			continue;
		}
		come_home(b, block);
		iswf_count(&A->count.handed_back[why], iswf_mask_count(&b->home));
		pthread_mutex_unlock(&A->lock);
		/* F2: nothing of it is aside or far. From here on the kernel fills what is empty.
		 */
		leave_mapped(block, children);
		pthread_mutex_lock(&A->lock);
		b->fixed = b->left = true;
		iswf_held_more(-(int64_t)iswf_mask_count(&b->home));
		b->home = iswf_mask_range(0, 0);
		b->wanted = true; /* who waits for a page of it asks the kernel now */
		iswf_release(block);
	}
}

/* Lock held. Its addresses are no longer ours: something else may be mapped there by now. */
static void unmapped(uint32_t block, uint32_t first, uint32_t end)
{
	struct iswf_mask pages = iswf_mask_range(first, end), home;
	struct iswf_block *b = iswf_claim(block);

	home = iswf_mask_and(&b->home, &pages);
	iswf_mask_take(&b->home, &pages);
	iswf_held_more(-(int64_t)iswf_mask_count(&home));
	b->fixed = true;
	iswf_mask_add(&b->hole, &pages);
	iswf_release(block);
}

/* Lock held. What is aside or far of pages that were moved elsewhere, with the first at `to`. */
static void follow(uint32_t block, uint32_t first, uint32_t end, char *to)
{
	struct iswf_mask pages = iswf_mask_range(first, end), aside, far;
	struct iswf_block *b = iswf_claim(block);
	char *base = to - (size_t)first * ISWF_PAGE_BYTES;

	aside = iswf_mask_and(&b->aside, &pages);
	far = iswf_mask_and(&b->far, &pages);
	pthread_mutex_unlock(&A->lock);
	iswf_copy_aside(block, base, &aside);
	if (iswf_mask_any(&far))
		iswf_fetch(block, base, &far);
	pthread_mutex_lock(&A->lock);
	iswf_count(&A->count.handed_back[ISWF_WHY_MOVED], end - first);
	iswf_release(block);
}

void iswf_removed(char *from, char *end, bool is_unmapped, char *to)
{
	pthread_mutex_lock(&A->lock);
	for (char *at = from; at < end;) {
		uint32_t block = (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
		uint32_t first = (uint32_t)((at - iswf_at(block)) / ISWF_PAGE_BYTES);
		char *stop = iswf_at(block + 1) < end ? iswf_at(block + 1) : end;
		uint32_t last = (uint32_t)((stop - iswf_at(block)) / ISWF_PAGE_BYTES);

		if (to != NULL)
			follow(block, first, last, to + (at - from));
		if (is_unmapped)
			unmapped(block, first, last);
		iswf_discard(block, first, last, false);
		at = stop;
	}
	pthread_mutex_unlock(&A->lock);
	if (to != NULL)
		(void)A->ops->leave(to, (size_t)(end - from), true);
}
