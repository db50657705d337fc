/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Brings the pages of a block that is claimed to where they belong, without the lock: from its slot
 * of the shadow, or from the device. What could not be placed stays where it was; who faults there
 * faults again.
 */
#include <errno.h>
#include <string.h>

#include "far/blocks.h"

#define RETRY_NS 10000000u /* between two tries of a device that cannot answer now */

#define A (&iswf_agent)

struct iswf_mask iswf_move_runs(char *to, char *from, const struct iswf_mask *pages, int *code_out)
{
	struct iswf_mask moved = {{0}};
	uint32_t run;

	*code_out = 0;
	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		size_t at = (size_t)first * ISWF_PAGE_BYTES, bytes = 0;
		struct iswf_mask part;

		*code_out = A->ops->move(to + at, from + at, (size_t)run * ISWF_PAGE_BYTES, &bytes);
		part = iswf_mask_range(first, first + (uint32_t)(bytes / ISWF_PAGE_BYTES));
		iswf_mask_add(&moved, &part);
		if (*code_out != 0)
			break;
	}
	return moved;
}

int iswf_copy_run(struct iswf_place *place, uint32_t first, uint32_t end, const char *from)
{
	while (first < end) {
		size_t at = (size_t)first * ISWF_PAGE_BYTES, bytes = 0;
		int code =
			A->ops->copy(place->to + at, from, (size_t)(end - first) * ISWF_PAGE_BYTES,
				     place->moved, &bytes);
		uint32_t stop = first + (uint32_t)(bytes / ISWF_PAGE_BYTES);
		struct iswf_mask part = iswf_mask_range(first, stop);

		iswf_mask_add(&place->placed, &part);
		if (code == 0 || code == -EAGAIN)
			return code;
		if (code == -EEXIST)
			iswf_set(&place->met, stop);
		else if (code == -ENOENT)
			iswf_set(&place->gone, stop);
		first = stop + 1; /* on any error that page alone stays where it was */
		from += bytes + ISWF_PAGE_BYTES;
	}
	return 0;
}

/* What of `pages` has found its end. */
static struct iswf_mask left_of(const struct iswf_mask *pages, const struct iswf_place *place)
{
	struct iswf_mask left = iswf_mask_without(pages, &place->placed);

	iswf_mask_take(&left, &place->met);
	iswf_mask_take(&left, &place->gone);
	return left;
}

void iswf_copy_aside(uint32_t block, struct iswf_place *place, const struct iswf_mask *pages)
{
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		char *from = iswf_shadow_of(&A->blocks[block]) + (size_t)first * ISWF_PAGE_BYTES;

		A->ops->fill_holes(from, (size_t)run * ISWF_PAGE_BYTES);
		if (iswf_copy_run(place, first, first + run, from) != 0)
			break;
	}
}

struct iswf_mask iswf_put_back(uint32_t block, const struct iswf_mask *aside)
{
	struct iswf_place place = {.to = iswf_at(block)};
	char *shadow = iswf_shadow_of(&A->blocks[block]);
	bool huge = A->ops->is_huge(shadow);
	int code;
	struct iswf_mask moved = iswf_move_runs(place.to, shadow, aside, &code), rest;
	uint32_t run;

	if (code == 0 && !huge) /* what is there still, nobody needs */
		(void)A->ops->untable(shadow);
	if (code == 0 || code == -EAGAIN)
		return moved;
	/* Pages that cannot be moved into the mapping as it is now: they are copied. */
	rest = iswf_mask_without(aside, &moved);
	iswf_copy_aside(block, &place, &rest);
	iswf_mask_add(&place.placed, &place.met); /* what is there is newer */
	for (uint32_t first = 0; (run = iswf_mask_run(&place.placed, &first)) != 0; first += run)
		(void)A->ops->discard(shadow + (size_t)first * ISWF_PAGE_BYTES,
				      (size_t)run * ISWF_PAGE_BYTES, true);
	iswf_mask_add(&moved, &place.placed);
	return moved;
}

struct arrival {
	uint32_t block, first, pages;
	const struct iswf_mask *wanted; /* of the block */
	struct iswf_place *place;
	char *cradle; /* instead: where the whole block goes */
	bool refused; /* by the kernel, for an event */
};

/* Takes what came into the ring, while the slot is ours. */
static int take_arrival(void *ctx, const char *from)
{
	struct arrival *arrival = ctx;
	struct iswf_mask part;
	uint32_t run;

	if (arrival->cradle != NULL) {
		memcpy(arrival->cradle, from, ISWF_BLOCK_BYTES);
		return 0;
	}
	part = iswf_mask_range(arrival->first, arrival->first + arrival->pages);
	part = iswf_mask_and(&part, arrival->wanted);
	part = left_of(&part, arrival->place);
	for (uint32_t first = 0; (run = iswf_mask_run(&part, &first)) != 0; first += run) {
		const char *at = from + (size_t)(first - arrival->first) * ISWF_PAGE_BYTES;
		int code = iswf_copy_run(arrival->place, first, first + run, at);

		arrival->refused = code != 0;
		if (code != 0)
			return code;
	}
	return 0;
}

static int ask_pages(struct arrival *arrival)
{
	return A->ops->ask(ISWF_READ, arrival->block, arrival->first, arrival->pages, NULL,
			   take_arrival, arrival);
}

static bool is_lost(int code)
{
	/* Of the last two: the device has forgotten the block, or there is none left. */
	return code == -ENODATA || code == -ENOENT || code == -EPIPE;
}

/* F5 */
static void poison(uint32_t block, struct iswf_place *place, uint32_t page)
{
	int code;

	/* Counted first: who waits for the page gets SIGBUS, and may end the process, at once. */
	iswf_count(&A->count.pages_lost, 1);
	code = A->ops->poison(place->to + (size_t)page * ISWF_PAGE_BYTES, place->moved);
	if (code != 0)
		iswf_count(&A->count.pages_lost, (uint64_t)-1);
	if (code == 0) {
		iswf_set(&place->placed, page);
		pthread_mutex_lock(&A->lock);
		A->blocks[block].unsure = true; /* freed, it is no page for anybody else */
		pthread_mutex_unlock(&A->lock);
	} else if (code == -EEXIST) {
		iswf_set(&place->met, page);
	} else if (code == -ENOENT) {
		iswf_set(&place->gone, page);
	}
}

/* One by one, to learn which are lost. What the device cannot say now is asked again later. */
static void ask_each(struct arrival *arrival)
{
	struct iswf_mask left = left_of(arrival->wanted, arrival->place);
	bool failed = false;

	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++) {
		int code;

		if (!iswf_has(&left, page))
			continue;
		arrival->first = page;
		arrival->pages = 1;
		code = ask_pages(arrival);
		if (arrival->refused)
			return;
		if (is_lost(code))
			poison(arrival->block, arrival->place, page);
		else
			failed |= code != 0;
	}
	if (failed)
		A->ops->pause(RETRY_NS);
}

void iswf_fetch(uint32_t block, struct iswf_place *place, const struct iswf_mask *wanted)
{
	struct arrival arrival = {.block = block, .place = place, .wanted = wanted};
	uint32_t end;
	uint64_t begin = iswf_now_ns();

	iswf_mask_hull(wanted, &arrival.first, &end);
	arrival.pages = end - arrival.first;
	if (ask_pages(&arrival) != 0 && !arrival.refused)
		ask_each(&arrival);
	iswf_count(&A->count.fetches, 1);
	iswf_count(&A->count.pages_in, iswf_mask_count(&place->placed));
	iswf_count(&A->count.fetch_wait_ns, iswf_now_ns() - begin);
}

struct iswf_mask iswf_fetch_whole(uint32_t block, const struct iswf_mask *far, char *cradle,
				  char *to)
{
	struct arrival arrival = {
		.block = block,
		.pages = ISWF_BLOCK_PAGES,
		.wanted = far,
		.cradle = cradle,
	};
	uint64_t begin = iswf_now_ns();
	size_t moved = 0;

	iswf_cradle_open(cradle);
	if (ask_pages(&arrival) == 0) {
		/* The device may have kept bytes of pages that are zeros by now. */
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
			if (!iswf_has(far, page))
				memset(cradle + (size_t)page * ISWF_PAGE_BYTES, 0, ISWF_PAGE_BYTES);
		(void)A->ops->move(to, cradle, ISWF_BLOCK_BYTES, &moved);
	}
	iswf_cradle_clear(cradle, moved);
	iswf_count(&A->count.fetches, 1);
	iswf_count(&A->count.pages_in, moved / ISWF_PAGE_BYTES);
	iswf_count(&A->count.fetch_wait_ns, iswf_now_ns() - begin);
	return iswf_mask_range(0, (uint32_t)(moved / ISWF_PAGE_BYTES));
}
