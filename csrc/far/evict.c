/* SPDX-License-Identifier: Apache-2.0 */
/* How a block leaves: aside, then to the device; and how the device's place for it is given up. */
#include <errno.h>

#include "far/blocks.h"

/* Moves out in a row that may fail (pages pinned or shared) before a block is left at home. They
 * are ISWF_REFUSED_MS apart: pages that the kernel has just swapped cannot be moved, either. */
#define REFUSALS_MAX 8u
#define FULL_NS      1000000000ull /* eviction rests so long when the device has no room */
/* So many blocks lie aside, in a hundred of the budget, before the oldest is sent. */
#define ASIDE_SHARE 10
/* With fewer pages of zeros than this the requests between them cost more than their bytes. */
#define ZEROS_MIN 64u
/* The same, of pages that the device has, between two that it has not. */
#define BRIDGE_PAGES 32u

#define A (&iswf_agent)

/* Lock held, claimed; all of them were moved. */
static void moved_aside(struct iswf_block *b, uint32_t block, const struct iswf_mask *moved)
{
	iswf_judge_parts(b);
	b->aside = *moved;
	iswf_mask_take(&b->home, moved);
	b->refusals = 0;
	b->window = b->window_end = 0;
	b->rent = 0;
	b->paid = b->filled = false;
	iswf_queue_add(ISWF_Q_ASIDE, block);
}

/* Lock held, claimed; `aside`: what could not even be put back, for an event. */
static void stays(struct iswf_block *b, const struct iswf_mask *aside)
{
	b->aside = *aside;
	iswf_mask_take(&b->home, aside);
	iswf_shadow_give(b);
}

static void refused(struct iswf_block *b, uint32_t block)
{
	iswf_count(&A->count.refused_moves, 1);
	iswf_queue_add(b->queue, block); /* at its end; its release sorts it */
	b->queued_ms = iswf_now_ms();
	b->filled = false; /* in FILLED it would be tried again at once */
	if (++b->refusals < REFUSALS_MAX)
		return;
	b->fixed = true;
	iswf_count(&A->count.handed_back[ISWF_WHY_PINNED], iswf_mask_count(&b->home));
}

/* F12. What still lies there stays. */
static void clear_slot(uint32_t block, const struct iswf_mask *still)
{
	struct iswf_mask pages = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	char *shadow = iswf_shadow_of(&A->blocks[block]);
	uint32_t run;

	iswf_mask_take(&pages, still);
	for (uint32_t first = 0; (run = iswf_mask_run(&pages, &first)) != 0; first += run)
		(void)A->ops->discard(shadow + (size_t)first * ISWF_PAGE_BYTES,
				      (size_t)run * ISWF_PAGE_BYTES, true);
}

/* Lock held, claimed: the program has freed all that is aside, so nothing is sent. It may take the
 * pages again meanwhile: then they are zeros. */
static void forget_aside(struct iswf_block *b, uint32_t block)
{
	static const struct iswf_mask none;
	int64_t pages = iswf_mask_count(&b->aside);

	pthread_mutex_unlock(&A->lock);
	clear_slot(block, &none);
	pthread_mutex_lock(&A->lock);
	b->aside = none;
	iswf_shadow_give(b);
	iswf_held_more(-pages);
}

/* Who reads these pages, which are aside, faults nowhere then (F6). */
static void fill_holes(uint32_t block, const struct iswf_mask *pages)
{
	char *shadow = iswf_shadow_of(&A->blocks[block]);
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run)
		A->ops->fill_holes(shadow + (size_t)first * ISWF_PAGE_BYTES,
				   (size_t)run * ISWF_PAGE_BYTES);
}

/*
 * Which of the pages, which are aside and there, are worth keeping: not those of zeros, where there
 * are many. A block is made at its first touch, and a program may have touched little of it.
 */
static struct iswf_mask without_zeros(uint32_t block, const struct iswf_mask *pages)
{
	char *shadow = iswf_shadow_of(&A->blocks[block]);
	struct iswf_mask zeros = {{0}};
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run)
		for (uint32_t page = first; page < first + run; page++)
			if (A->ops->is_zeros(shadow + (size_t)page * ISWF_PAGE_BYTES))
				iswf_set(&zeros, page);
	return iswf_mask_count(&zeros) < ZEROS_MIN ? *pages : iswf_mask_without(pages, &zeros);
}

/*
 * Lock held, claimed; all of them were moved. What is zeros still is given up, since nothing else
 * costs as little, and the rest goes home: it may be in use.
 */
static void give_up_zeros(struct iswf_block *b, uint32_t block, const struct iswf_mask *moved)
{
	struct iswf_mask kept, rest, zeros;

	pthread_mutex_unlock(&A->lock);
	fill_holes(block, moved);
	kept = without_zeros(block, moved);
	zeros = iswf_mask_without(moved, &kept);
	rest = iswf_put_back(block, &kept);
	rest = iswf_mask_without(&kept, &rest);
	clear_slot(block, &rest);
	pthread_mutex_lock(&A->lock);
	b->filled = false;
	b->looked = true;
	b->refusals = 0;
	iswf_mask_take(&b->home, &zeros);
	stays(b, &rest);
	iswf_held_more(-(int64_t)iswf_mask_count(&zeros));
	iswf_queue_add(iswf_mask_any(&rest) ? ISWF_Q_ASIDE : ISWF_Q_HOME, block);
}

bool iswf_evict(bool freed_alone)
{
	struct iswf_mask home, moved, aside = {{0}};
	struct iswf_block *b;
	uint32_t block = ISWF_NONE;
	bool huge;
	int code;

	pthread_mutex_lock(&A->lock);
	if (A->watched && !iswf_rests() && A->shadow_free_count > 0)
		block = freed_alone                     ? iswf_claim_first(ISWF_Q_FREED)
			: iswf_keeps_all(iswf_now_ns()) ? iswf_claim_unsent()
							: iswf_claim_victim();
	if (block == ISWF_NONE) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	b = &A->blocks[block];
	iswf_shadow_take(b);
	home = b->home;
	pthread_mutex_unlock(&A->lock);

	huge = A->ops->is_huge(iswf_at(block));
	moved = iswf_move_runs(iswf_shadow_of(b), iswf_at(block), &home, &code);
	/* A table at either place splits the page, and leaves one at the other. */
	huge = huge && (!iswf_mask_any(&moved) || A->ops->is_huge(iswf_shadow_of(b)));
	if (code != 0 && iswf_mask_any(&moved)) { /* some are pinned: a block leaves whole */
		aside = iswf_put_back(block, &moved);
		aside = iswf_mask_without(&moved, &aside);
	}

	pthread_mutex_lock(&A->lock);
	b->tabled |= !huge;
	if (code == 0 && b->filled && iswf_mask_any(&b->live)) {
		give_up_zeros(b, block, &moved);
	} else if (code == 0) {
		moved_aside(b, block, &moved);
		if (!iswf_mask_any(&b->live))
			forget_aside(b, block);
	} else {
		stays(b, &aside);
		if (code != -EAGAIN)
			refused(b, block);
	}
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
	return code != -EAGAIN;
}

/* Sends them; returns those that the device has now. *code_out: why not all. */
static struct iswf_mask send_runs(uint32_t block, const struct iswf_mask *pages, int *code_out)
{
	char *shadow = iswf_shadow_of(&A->blocks[block]);
	struct iswf_mask sent = {{0}};
	uint32_t run;

	*code_out = 0;
	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		struct iswf_mask part = iswf_mask_range(first, first + run);
		char *from = shadow + (size_t)first * ISWF_PAGE_BYTES;

		*code_out = A->ops->ask(ISWF_WRITE, block, first, run, from, NULL, NULL);
		if (*code_out != 0)
			break;
		iswf_mask_add(&sent, &part);
	}
	return sent;
}

/* Short gaps of clean pages between dirty ones become dirty: less is asked then. */
static void bridge(struct iswf_mask *dirty, struct iswf_mask *clean)
{
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(clean, &first)) != 0; first += run) {
		struct iswf_mask gap = iswf_mask_range(first, first + run);

		if (run >= BRIDGE_PAGES || first == 0 || first + run == ISWF_BLOCK_PAGES ||
		    !iswf_has(dirty, first - 1) || !iswf_has(dirty, first + run))
			continue;
		iswf_mask_add(dirty, &gap);
		iswf_mask_take(clean, &gap);
	}
}

/*
 * F15. Of the pages, which are aside, sends what the device has not. Those of zeros are taken out
 * of *pages. Returns what the device has then, and what of it is known in *known.
 */
static struct iswf_mask send_changed(uint32_t block, struct iswf_mask *pages,
				     struct iswf_mask *known, int *code_out)
{
	struct iswf_mask clean, dirty, sent;

	fill_holes(block, pages);
	clean = iswf_know(block, pages);
	clean = iswf_mask_and(&clean, known);
	dirty = iswf_mask_without(pages, &clean);
	dirty = without_zeros(block, &dirty);
	*pages = dirty;
	iswf_mask_add(pages, &clean);
	bridge(&dirty, &clean);
	if (iswf_mask_any(&clean) && !iswf_are_confirmed(block, &clean)) {
		dirty = *pages;
		clean = iswf_mask_range(0, 0);
	}
	iswf_mask_take(known, &dirty);
	sent = send_runs(block, &dirty, code_out);
	iswf_mask_add(known, &sent);
	iswf_count(&A->count.pages_out, iswf_mask_count(&sent));
	iswf_mask_add(&sent, &clean);
	return sent;
}

/* Lock held, claimed: what was aside was sent or needless, is home again, or still is there. */
static void sent_aside(struct iswf_block *b, const struct iswf_mask *sent,
		       const struct iswf_mask *home, const struct iswf_mask *still)
{
	int64_t before = iswf_mask_count(&b->aside);

	b->aside = *still;
	iswf_mask_add(&b->home, home);
	iswf_go_away(b, sent);
	b->placed |= iswf_mask_any(sent);
	if (!b->ahead) /* else it was away all the time */
		b->left_at = ++A->left_count;
	iswf_shadow_give(b);
	iswf_held_more((int64_t)iswf_mask_count(home) + iswf_mask_count(still) - before);
}

bool iswf_send(void)
{
	struct iswf_mask live, known, sent, rest, home = {{0}};
	struct iswf_block *b;
	uint32_t block;
	int code = 0;

	pthread_mutex_lock(&A->lock);
	block = iswf_rests() ? ISWF_NONE : iswf_claim_first(ISWF_Q_ASIDE);
	if (block == ISWF_NONE) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	b = &A->blocks[block];
	live = iswf_mask_and(&b->aside, &b->live);
	known = b->known;
	pthread_mutex_unlock(&A->lock);

	sent = send_changed(block, &live, &known, &code);
	rest = iswf_mask_without(&live, &sent);
	if (iswf_mask_any(&rest))
		home = iswf_put_back(block, &rest);
	iswf_mask_take(&rest, &home);
	clear_slot(block, &rest);

	pthread_mutex_lock(&A->lock);
	if (code != 0) {
		iswf_count(&A->count.no_room, 1);
		A->full_until_ns = iswf_now_ns() + FULL_NS;
	}
	iswf_count(&A->count.blocks_out, 1);
	b->known = known;
	sent_aside(b, &sent, &home, &rest);
	if (!b->placed) /* so no drop will */
		iswf_forget_digests(block);
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
	return !iswf_mask_any(&rest);
}

bool iswf_drop(void)
{
	uint32_t block;
	int code;

	pthread_mutex_lock(&A->lock);
	block = iswf_claim_first(ISWF_Q_DROP);
	if (block != ISWF_NONE)
		iswf_forget_digests(block);
	pthread_mutex_unlock(&A->lock);
	if (block == ISWF_NONE)
		return false;
	code = A->ops->ask(ISWF_DISCARD, block, 0, ISWF_BLOCK_PAGES, NULL, NULL, NULL);
	pthread_mutex_lock(&A->lock);
	if (code == 0 || code == -ENOENT)
		A->blocks[block].placed = false;
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
	return code == 0;
}

bool iswf_work_once(void)
{
	int64_t aside_max;
	bool watched, tight, full, stale, paused;

	pthread_mutex_lock(&A->lock);
	watched = A->watched;
	aside_max = A->budget_pages * ASIDE_SHARE / 100 / ISWF_BLOCK_PAGES;
	tight = iswf_is_tight();
	full = A->queues[ISWF_Q_ASIDE].count > aside_max;
	stale = iswf_is_stale();
	paused = iswf_is_paused(iswf_now_ns());
	pthread_mutex_unlock(&A->lock);
	if (!watched)
		return iswf_watch() || iswf_give_up_stale();
	if (iswf_make_ready())
		return true;
	if (!tight)
		return (stale && iswf_evict(true)) || iswf_ahead() || iswf_drop();
	if ((paused || !full) && iswf_evict(false))
		return true;
	if (paused)
		return iswf_drop(); /* what is aside is wanted soon, or the kernel swaps it */
	return iswf_send() || iswf_evict(false) || iswf_drop();
}
